"""The load-test harness: one seeded schedule, lean client processes, honest clocks, and reports of them.

``scripts.load_tester.run.run_load(config)`` is the library's door; ``scripts.load_tester.main`` is the command.
"""
