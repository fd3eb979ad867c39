"""Descriptions of Mixture-of-Experts models."""

from jaxmoe.models.attention import Attention as Attention
from jaxmoe.models.attention import GroupedQueryAttention as GroupedQueryAttention
from jaxmoe.models.attention import LatentAttention as LatentAttention
from jaxmoe.models.hugging_face import from_hugging_face as from_hugging_face
from jaxmoe.models.hugging_face import read_hugging_face as read_hugging_face
from jaxmoe.models.moe import ModelError as ModelError
from jaxmoe.models.moe import MoEModel as MoEModel
from jaxmoe.models.moe import SharedExperts as SharedExperts
