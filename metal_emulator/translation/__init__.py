"""Translates Metal source to C++."""

from metal_emulator.translation.kernels import Argument, FunctionConstant, KernelInfo
from metal_emulator.translation.mutants import Mutant
from metal_emulator.translation.tokens import TranslationError
from metal_emulator.translation.translate import Translation, translate

__all__ = ["Argument", "FunctionConstant", "KernelInfo", "Mutant", "Translation", "TranslationError", "translate"]
