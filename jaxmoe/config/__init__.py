"""Configuration files: YAML to a validated description to what computes."""

from jaxmoe.config.base import ConfigError as ConfigError
from jaxmoe.config.build import build_even_parts as build_even_parts
from jaxmoe.config.build import build_layer_model as build_layer_model
from jaxmoe.config.build import build_machine as build_machine
from jaxmoe.config.build import build_time_model as build_time_model
from jaxmoe.config.build import build_topology as build_topology
from jaxmoe.config.build import build_tuner_settings as build_tuner_settings
from jaxmoe.config.loader import load_hardware as load_hardware
from jaxmoe.config.loader import load_model as load_model
from jaxmoe.config.loader import load_scenario as load_scenario
from jaxmoe.config.loader import resolved as resolved
from jaxmoe.config.model import ModelConfig as ModelConfig
from jaxmoe.config.model import build_model as build_model
from jaxmoe.config.networks import HardwareConfig as HardwareConfig
from jaxmoe.config.schema import FileTrace as FileTrace
from jaxmoe.config.schema import PresetTrace as PresetTrace
from jaxmoe.config.schema import ProcessTrace as ProcessTrace
from jaxmoe.config.schema import Scenario as Scenario
from jaxmoe.config.schema import SyntheticTrace as SyntheticTrace
from jaxmoe.config.schema import WorkloadConfig as WorkloadConfig
from jaxmoe.config.tuning import TuningConfig as TuningConfig
