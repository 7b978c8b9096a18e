"""Training: `nsa train`."""

from typing import TYPE_CHECKING

from nsa.lazy import lazy_exports

if TYPE_CHECKING:
    from nsa.commands.train import add_arguments
    from nsa.train.command import run
    from nsa.train.config import TrainConfig, load_config
    from nsa.train.loop import Trainer
    from nsa.train.step import TrainStep, learning_rate
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "nsa.commands.train": ("add_arguments",),
            "nsa.train.command": ("run",),
            "nsa.train.config": ("TrainConfig", "load_config"),
            "nsa.train.loop": ("Trainer",),
            "nsa.train.step": ("TrainStep", "learning_rate"),
        },
    )
