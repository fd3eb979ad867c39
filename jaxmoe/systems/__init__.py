"""Systems: the methods of papers as compositions of parts, by name."""

from jaxmoe.systems.hd_moe import HDMoE as HDMoE
from jaxmoe.systems.registry import SYSTEMS as SYSTEMS
from jaxmoe.systems.registry import system_of as system_of
from jaxmoe.systems.setting import AbstractSystem as AbstractSystem
from jaxmoe.systems.setting import Setting as Setting
from jaxmoe.systems.setting import UnsuitableSystemError as UnsuitableSystemError
from jaxmoe.systems.static import Static as Static
