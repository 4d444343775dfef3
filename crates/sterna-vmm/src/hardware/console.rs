//! The common output sink of the machine's consoles.

use std::io::{self, Write};
use std::sync::Arc;

use parking_lot::Mutex;
use sterna_standby::ByteGate;

/// A clonable handle of the sink, one per console device.
#[derive(Clone)]
pub(crate) struct Console {
    to: Arc<Mutex<Box<dyn Write + Send>>>,
    gate: Option<Arc<ByteGate>>,
}

impl Console {
    /// Writes bytes to `to`. If `to` is a gate, it holds back the bytes of a protected guest until their
    /// checkpoint is held.
    pub(crate) fn at_gate(to: Box<dyn Write + Send>, gate: Option<Arc<ByteGate>>) -> Self {
        Self { to: Arc::new(Mutex::new(to)), gate }
    }

    /// Whether the guest must wait before it writes more. [`Console::when_room`] reports when the wait ends.
    pub(crate) fn is_full(&self) -> bool {
        self.gate.as_ref().is_some_and(|gate| gate.is_full())
    }

    /// Registers `told`, which is called from any thread when there is room again.
    pub(crate) fn when_room(&self, told: impl Fn() + Send + Sync + 'static) {
        if let Some(gate) = &self.gate {
            gate.when_room(told);
        }
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.lock().flush()
    }
}
