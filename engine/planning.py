"""Former path of `treadle.tools.plan`."""

raise ImportError(
    f"{__name__} has moved. Import from treadle.tools.plan instead, such as "
    "`from treadle.tools.plan.simulation import simulate`.",
    name=__name__,
)
