"""Fixtures that several test files use."""

from kvsketch.tests.cuda_host.fixtures import cupy as cupy
