"""Side-by-side measurements. Result files are data: command, versions and raw step times stand beside every figure."""
