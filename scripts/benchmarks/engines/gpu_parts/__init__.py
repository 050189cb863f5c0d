"""The parts of ``bench gpu``. Each returns its figures by name and ends within its share of the time."""
