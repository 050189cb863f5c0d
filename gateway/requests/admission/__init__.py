"""What decides whether a request may begin, and when: admission, priorities, quotas, deadlines, the queue."""
