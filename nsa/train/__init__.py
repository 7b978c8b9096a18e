"""Training: `nsa train`."""

from nsa.train.loop import TrainConfig, Trainer, add_arguments, run
from nsa.train.step import TrainStep, learning_rate

__all__ = ["TrainConfig", "TrainStep", "Trainer", "add_arguments", "learning_rate", "run"]
