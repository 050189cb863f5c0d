"""The load tester: one seeded schedule, client processes with exact clocks, and reports.

Programs call ``run.run_load``; ``main.main`` is the command.
"""
