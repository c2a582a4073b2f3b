"""`akv stat`: what running connectors of this machine say of themselves."""
