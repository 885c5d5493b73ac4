"""The worker: takes requests off the queue, batches them and runs them on its device."""
