"""The folder of one run: `runs/<name>/<n>/`, its lock, and what can be read from it afterwards."""
