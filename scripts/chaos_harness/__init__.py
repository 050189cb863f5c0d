"""The chaos harness: a real service under load and a seeded schedule of faults, and the proof that nothing was lost."""
