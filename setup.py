"""What pyproject.toml cannot say: `conf/` and `examples/` are packaged below `aligner`.

They stand at the top of the repository, where one looks for them, and in the wheel as
`aligner/conf` and `aligner/examples` (`aligner.commands.shipped` finds both).
"""

from setuptools import find_packages, setup

SHIPPED = {
    "aligner.conf": "conf",
    "aligner.examples": "examples",
    "aligner.examples.extend": "examples/extend",
    "aligner.examples.python": "examples/python",
    "aligner.examples.tasks": "examples/tasks",
}

setup(
    packages=[*find_packages(include=["aligner*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={
        "aligner": ["py.typed"],
        "aligner.conf": ["**/*.yaml"],
        "aligner.device": ["pages.cpp"],
        "aligner.examples": ["templates/*", "slurm/*"],
        "aligner_plan.dry": ["guard.cpp"],
        "aligner.observe": ["metric_names.md"],
        "aligner.observe.report": ["templates/*"],
    },
)
