"""Door to the template kernels: the rules that choose templates, and `specialization`, which fills them."""

from cuda_compiler.rules.table import RULES, expand
from cuda_compiler.specialization.specializer import Specializer
from cuda_compiler.specialization.template_files import kernel_text, template_text

__all__ = ["RULES", "Specializer", "expand", "kernel_text", "template_text"]
