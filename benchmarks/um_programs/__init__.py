"""Four programs with published placements of managed memory, rewritten: BlackScholes, conjugate
gradient, FFT convolution and FDTD-3D.

The buffers, the phases and the placements are those of https://github.com/steven-chien/um-apps
(Chien, Peng, Markidis: Performance Evaluation of Advanced Features in CUDA Unified Memory, 2019).
No code of it is here.
"""

from __future__ import annotations

from collections.abc import Callable

from .black_scholes import BlackScholes
from .conjugate_gradient import ConjugateGradient
from .fdtd import FiniteDifferences
from .fft_convolution import FFTConvolution
from .program import Program

PROGRAMS: dict[str, Callable[[], Program]] = {
    "black_scholes": BlackScholes,
    "conjugate_gradient": ConjugateGradient,
    "fft_convolution": FFTConvolution,
    "fdtd": FiniteDifferences,
}
"""The functions that make each program, in the size that is measured."""
