"""One model over several ranks, each with a part of every layer: what a rank holds, and how ranks compute together."""
