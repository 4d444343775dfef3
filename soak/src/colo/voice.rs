//! The text output of a guest, and the observer that reads it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use sterna::{RunState, SourceVm};
use sterna_guests::ProcessGuest;
use sterna_standby::ByteGate;

/// While the guest runs, it prints its number of steps, line by line. Heard output can therefore be compared
/// with the guest's state.
pub(super) struct Voice {
    pub(super) gate: Arc<ByteGate>,
    heard: Arc<Mutex<Vec<u8>>>,
    said: Arc<Mutex<Vec<u8>>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Voice {
    /// `slow`: time that the observer takes to read each piece.
    pub(super) fn new(guest: &Arc<ProcessGuest>, slow: Duration) -> Result<Self, String> {
        let heard = Arc::<Mutex<Vec<u8>>>::default();
        let hears = Arc::clone(&heard);
        let write = move |bytes: &[u8]| {
            if !slow.is_zero() {
                std::thread::sleep(slow);
            }
            hears.lock().extend_from_slice(bytes);
        };
        let mut voice = Self::writing(guest, write)?;
        voice.heard = heard;
        Ok(voice)
    }

    /// A voice whose observer is in another process.
    pub(super) fn writing(
        guest: &Arc<ProcessGuest>,
        write: impl FnMut(&[u8]) + Send + 'static,
    ) -> Result<Self, String> {
        let (said, ends) = (Arc::<Mutex<Vec<u8>>>::default(), Arc::<AtomicBool>::default());
        let gate = Arc::new(ByteGate::new(1 << 20, write).map_err(|error| error.to_string())?);
        let thread = std::thread::spawn({
            let (guest, gate) = (Arc::clone(guest), Arc::clone(&gate));
            let (said, ends) = (Arc::clone(&said), Arc::clone(&ends));
            move || {
                while !ends.load(Ordering::SeqCst) {
                    if guest.run_state() == RunState::Running {
                        let line = format!("{}\n", guest.progress().total_steps());
                        said.lock().extend_from_slice(line.as_bytes());
                        gate.put(line.as_bytes());
                    }
                    std::thread::sleep(Duration::from_micros(700));
                }
            }
        });
        Ok(Self { gate, heard: Arc::default(), said, ends, thread: Some(thread) })
    }

    /// Stops the output.
    pub(super) fn end(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }

    pub(super) fn heard(&self) -> Vec<u8> {
        self.heard.lock().clone()
    }

    /// All output of the guest on this side, heard or not.
    pub(super) fn said(&self) -> Vec<u8> {
        self.said.lock().clone()
    }
}

impl Drop for Voice {
    fn drop(&mut self) {
        self.end();
    }
}

/// The numbers of complete lines. It is an error if they decrease.
pub(super) fn numbers(text: &[u8]) -> Result<Vec<u64>, String> {
    let text = std::str::from_utf8(text).map_err(|error| error.to_string())?;
    let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
    let parse = |line: &str| line.parse::<u64>().map_err(|_| format!("{line:?} is no line of the guest's"));
    let numbers = whole.lines().map(parse).collect::<Result<Vec<_>, _>>()?;
    match numbers.windows(2).find(|pair| pair[0] > pair[1]) {
        Some(pair) => Err(format!("{} was said after {}", pair[1], pair[0])),
        None => Ok(numbers),
    }
}

#[cfg(test)]
mod tests {
    use super::numbers;

    #[test]
    fn lines_out_of_order_or_torn_are_found() {
        assert_eq!(numbers(b"1\n2\n2\n3"), Ok(vec![1, 2, 2]));
        assert!(numbers(b"1\n3\n2\n").is_err());
        assert!(numbers(b"1\nx2\n").is_err());
    }
}
