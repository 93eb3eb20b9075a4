"""Run the user's model without side effects on it or on global state, from any number of threads."""

from lapwing.runtime.sandbox.borrowing import borrowed, install
from lapwing.runtime.sandbox.copying import Template
from lapwing.runtime.sandbox.process import (
    autocast_devices,
    forward_mode_lock,
    plain_tensors,
    quiet_fallback,
    random_state_kept,
    random_states,
    same_states,
)
from lapwing.runtime.sandbox.random_numbers import seed_everything, set_states, states_as_tensors
from lapwing.runtime.sandbox.watching import MathAttention, PlainNorms, UseOfTensors

__all__ = [
    "MathAttention",
    "PlainNorms",
    "Template",
    "UseOfTensors",
    "autocast_devices",
    "borrowed",
    "forward_mode_lock",
    "install",
    "plain_tensors",
    "quiet_fallback",
    "random_state_kept",
    "random_states",
    "same_states",
    "seed_everything",
    "set_states",
    "states_as_tensors",
]
