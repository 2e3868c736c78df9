"""The rules, one file each: functions of distributions over the vocabulary. A "law" is such a distribution, after all
controls. The import of this package registers every rule."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
