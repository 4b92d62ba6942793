"""Print what the matrices have measured."""

from support import fault_cells


def pytest_terminal_summary(terminalreporter):
    rows = {"fault": [], "signal": []}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for kind, (cell, words) in (p for p in getattr(report, "user_properties", ()) if p[0] in rows):
                rows[kind].append((cell, words))
    faults = [(fault_cells.FaultCell(**cell), words) for cell, words in rows["fault"]]
    signals = [(fault_cells.SignalCell(**cell), words) for cell, words in rows["signal"]]
    if faults:
        terminalreporter.section("faults: seconds to the end of the job, exit status; what is wrong")
        terminalreporter.write_line(fault_cells.fault_table(faults))
    if signals:
        terminalreporter.section("signals: seconds to the end of the job, exit status; what is wrong")
        terminalreporter.write_line(fault_cells.signal_table(signals))
    tables = [
        table
        for reports in terminalreporter.stats.values()
        for report in reports
        for kind, table in getattr(report, "user_properties", ())
        if kind == "soak" and report.when == "call"
    ]
    if tables:
        terminalreporter.section("soak: medians per minute, growth after the warm-up")
        terminalreporter.write_line("\n\n".join(tables))
