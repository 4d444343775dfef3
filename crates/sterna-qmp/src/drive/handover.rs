//! Which guest may run when both monitors are in hand.
//!
//! A QEMU source that misses the destination's SHUT resumes its guest by itself, while the destination has
//! started it: two guests on one disk. So the destination is told not to start its guest (`stop` while it
//! waits), and `cont` goes there only when the source has said `completed` (ARCHITECTURE.md, *Handover*).
//! Between two Sternas the engine sees to it, and nothing is held.
//!
//! A QEMU source believes a migration completed as soon as its last byte is written, unless `return-path` is
//! on. With both monitors in hand it is switched on for the time of the migration.

use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::{Changed, DriveError, Progress, Settings, Vm};

/// How long a destination may need to say that it has loaded everything, after its source has said so.
const LOADED_LIMIT: Duration = Duration::from_secs(30);

/// One migration between two monitored VMs.
#[derive(Debug)]
pub struct Handover {
    source: Changed,
    ran: bool,
    is_held: bool,
}

/// Refuses a pair that cannot work: the stream names its machine type, and only the same one can load it.
pub fn compare(source: &mut Vm, destination: &mut Vm) -> Result<(), DriveError> {
    let (leaves, arrives) = (source.machine_type()?, destination.machine_type()?);
    if leaves == arrives || leaves.is_empty() || arrives.is_empty() {
        return compare_blocks(source, destination);
    }
    let advice = if source.is_sterna() != destination.is_sterna() {
        "Sterna's own VMM is another machine than any of QEMU's, so a guest cannot move between the two"
    } else {
        "start the destination with the source's machine type, its version included"
    };
    Err(DriveError::Unfit(format!(
        "the machine types differ: `{leaves}` at {}, `{arrives}` at {}; {advice}",
        source.at(),
        destination.at()
    )))
}

/// A block of the same name must have the same size, unless it can grow. QEMU's own sentence about it goes
/// to the destination's standard error only.
fn compare_blocks(source: &mut Vm, destination: &mut Vm) -> Result<(), DriveError> {
    let (Some(leaves), Some(arrives)) = (source.blocks()?, destination.blocks()?) else { return Ok(()) };
    for block in leaves {
        let Some(other) = arrives.iter().find(|other| other.name == block.name) else { continue };
        let fits = other.used_bytes == block.used_bytes
            || other.most_bytes > other.used_bytes && other.most_bytes >= block.used_bytes;
        if !fits {
            return Err(DriveError::Unfit(format!(
                "the RAM block `{}` has {} bytes at {} and {} at {}; start the destination with the same \
                 memory and devices",
                block.name,
                block.used_bytes,
                source.at(),
                other.used_bytes,
                destination.at()
            )));
        }
    }
    Ok(())
}

impl Handover {
    /// Before `migrate`: prepares `source`, and holds `destination` if its guest must not start by itself.
    /// The operator's own settings have been made already.
    pub fn begin(source: &mut Vm, destination: Option<&mut Vm>) -> Result<Self, DriveError> {
        let ran = source.run_state()? == "running";
        let mut capabilities = vec![("events", true)];
        let is_held = destination.is_some() && !source.is_sterna();
        if is_held {
            capabilities.push(("return-path", true));
        }
        let source = if source.is_sterna() {
            Changed::default()
        } else {
            Settings::read(source)?.change(source, &capabilities, &Map::new())?
        };
        if let Some(destination) = destination.filter(|_| is_held) {
            destination.execute("stop", Value::Null)?;
        }
        Ok(Self { source, ran, is_held })
    }

    /// After the source has said `completed`: starts the guest at the destination, if it ran and was held.
    /// Gives back whether it did.
    pub fn completed(self, source: &mut Vm, destination: Option<&mut Vm>) -> Result<bool, DriveError> {
        let mut started = false;
        if let Some(destination) = destination.filter(|_| self.is_held) {
            wait_until_loaded(destination)?;
            if self.ran {
                destination.execute("cont", Value::Null)?;
                started = true;
            }
        }
        self.put_back(source);
        Ok(started)
    }

    /// After a failure or a cancel: asks the destination why, and ends it if it is a QEMU that waits for
    /// nothing any more, as it would have done by itself. Gives back its reason.
    pub fn failed(self, source: &mut Vm, destination: Option<&mut Vm>) -> Option<String> {
        let mut reason = None;
        if let Some(destination) = destination.filter(|destination| !destination.is_sterna()) {
            // It may be gone already; then there is nothing to ask.
            if let Ok(progress) = wait_until_over(destination, Duration::from_secs(2)) {
                reason = progress.error;
                let _ = destination.execute("quit", Value::Null);
            }
        }
        self.put_back(source);
        reason
    }

    /// After the source has gone away in the middle: what became of the guest, as a sentence.
    pub fn lost(self, source: &Vm, destination: Option<&mut Vm>) -> String {
        let gone = format!("the source's monitor ({}) has gone in the middle of the migration", source.at());
        let Some(destination) = destination else {
            return format!("{gone}; ask the destination whether it has the guest");
        };
        match wait_until_over(destination, Duration::from_secs(2)) {
            Ok(progress) if progress.status == "completed" && self.is_held => format!(
                "{gone}, but {} has the whole guest, paused: if the source's process has ended for good, give \
                 `cont` there",
                destination.at()
            ),
            Ok(progress) if progress.status == "completed" => {
                format!("{gone}, and {} has the whole guest", destination.at())
            }
            Ok(_) if !destination.is_sterna() => {
                // It waits for nothing any more, and would have ended by itself.
                let _ = destination.execute("quit", Value::Null);
                format!(
                    "{gone}, before all of the guest had left: if its process has ended, so has the guest"
                )
            }
            _ => format!(
                "{gone}, and {} has not received the whole guest: if the source's process has ended, the \
                 guest is lost with it",
                destination.at()
            ),
        }
    }

    /// The guest's whereabouts are settled; settings are worth no error.
    fn put_back(self, source: &mut Vm) {
        let _ = self.source.undo(source);
    }
}

fn wait_until_loaded(destination: &mut Vm) -> Result<(), DriveError> {
    let progress = wait_until_over(destination, LOADED_LIMIT)?;
    if progress.status == "completed" {
        return Ok(());
    }
    Err(DriveError::Failed(format!(
        "the source has sent everything, but {} says `{}`{}; the guest is stopped at the source: `cont` there \
         lets it run on",
        destination.at(),
        progress.status,
        progress.error.map_or(String::new(), |error| format!(" ({error})"))
    )))
}

fn wait_until_over(vm: &mut Vm, limit: Duration) -> Result<Progress, DriveError> {
    let deadline = Instant::now() + limit;
    loop {
        let progress = vm.progress()?;
        if progress.is_over() || Instant::now() > deadline {
            return Ok(progress);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
