from .hugging_face import from_hugging_face as from_hugging_face
from .moe import Attention as Attention
from .moe import GroupedQueryAttention as GroupedQueryAttention
from .moe import LatentAttention as LatentAttention
from .moe import ModelError as ModelError
from .moe import MoEModel as MoEModel
from .moe import SharedExperts as SharedExperts
