"""Sweeps in other processes: Hydra's launchers, signals, GPUs, and a sweep that is killed."""

import csv
import json
import os
import signal
import time
from pathlib import Path

import pytest

from attnkit.launch import devices, trials
from tests.launch.test_sweep_again import QUICK, rows, started, states, steps_of
