"""The models in configs/models, by name; `tiny` is none of a publisher's."""

from pathlib import Path

from jaxmoe.config import ModelConfig, build_model
from jaxmoe.config.files import read_mapping
from jaxmoe.models import MoEModel


def _built(file: Path) -> MoEModel:
    return build_model(ModelConfig.model_validate({"name": file.stem} | read_mapping(file)))


FILES = sorted((Path(__file__).resolve().parents[2] / "configs" / "models").glob("*.yaml"))
SHIPPED = {file.stem: _built(file) for file in FILES}
