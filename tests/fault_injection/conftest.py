"""Print what the matrices and the soak have measured."""

TITLES = {
    "faults": "faults: seconds to the end of the job, exit status; what is wrong",
    "signals": "signals: seconds to the end of the job, exit status; what is wrong",
    "soak": "soak: medians, growth after the warm-up",
}


def pytest_terminal_summary(terminalreporter):
    measured = {kind: [] for kind in TITLES}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                for kind, text in report.user_properties:
                    measured.setdefault(kind, []).append(text)
    for kind, title in TITLES.items():
        if measured[kind]:
            terminalreporter.section(title)
            terminalreporter.write_line("\n".join(measured[kind]))
