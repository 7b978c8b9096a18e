"""Training: `nsa train`."""

from nsa.train.command import add_arguments, run
from nsa.train.config import TrainConfig, load_config
from nsa.train.loop import Trainer
from nsa.train.step import TrainStep, learning_rate

__all__ = ["TrainConfig", "TrainStep", "Trainer", "add_arguments", "learning_rate", "load_config", "run"]
