"""What programs hold: Client, Queue, Job, Task, Worker. Synchronous, for threads and for gevent."""
