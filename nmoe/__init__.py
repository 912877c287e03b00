"""The `nmoe` of the source documents: only `nmoe.data`, whose names lead to the functions and
classes of this project.

Your own package `nmoe`, such as a trainer, keeps its modules: Python imports each module from the
first package on the path that has it.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
