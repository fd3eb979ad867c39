"""Descriptions of Mixture-of-Experts models."""

from jaxmoe.models.moe import MoEModel as MoEModel
