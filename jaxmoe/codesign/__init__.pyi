from .space import HardwareSpace as HardwareSpace
from .space import read_space as read_space
