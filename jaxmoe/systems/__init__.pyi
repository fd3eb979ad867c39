from .hd_moe import HDMoE as HDMoE
from .registry import SYSTEMS as SYSTEMS
from .registry import Static as Static
from .registry import system_of as system_of
from .setting import AbstractSystem as AbstractSystem
from .setting import Setting as Setting
from .setting import UnsuitableSystemError as UnsuitableSystemError
