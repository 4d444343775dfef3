//! Where the bytes of the machine's consoles go.

use std::io::{self, Write};
use std::sync::Arc;

use parking_lot::Mutex;

/// It, shared by the devices that write to it.
#[derive(Clone)]
pub(crate) struct Console(Arc<Mutex<Box<dyn Write + Send>>>);

impl Console {
    pub(crate) fn new(to: Box<dyn Write + Send>) -> Self {
        Self(Arc::new(Mutex::new(to)))
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.lock().flush()
    }
}
