"""The operators, by family. Importing this package declares them all."""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    if "._" not in _module.name:
        importlib.import_module(_module.name)
