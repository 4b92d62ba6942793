from pathlib import Path
def write_report(study, folder): return "todo"
