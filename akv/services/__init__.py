"""Tasks that live as long as the connector, all in the task group that `open_connector()` owns."""
