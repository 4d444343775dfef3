//! Which guest may run when both monitors are in hand.
//!
//! A QEMU source that misses the destination's SHUT resumes its guest by itself, while the destination has
//! started it: two guests on one disk. So the destination is told not to start its guest (`stop` while it
//! waits), and `cont` goes there only when the source has said `completed` (ARCHITECTURE.md, *Handover*).
//! Between two Sternas the engine sees to it, and nothing is held.
//!
//! The hold hides what the destination would have done by itself: started with `-S` it leaves its guest paused. So that
//! is looked up before ([`Vm::was_started_stopped`]), and then nobody gives `cont`.
//!
//! A QEMU source believes a migration completed as soon as its last byte is written, unless `return-path` is
//! on. With both monitors in hand it is switched on for the time of the migration, but where [`ReturnPath::AsSet`] says
//! otherwise. Without it the destination is asked, too, before anybody gives `cont`; but a guest that did not arrive stays
//! stopped at its source until somebody gives `cont` there.

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
    /// The destination was told `stop`, which is new to it: it is taken back if nothing begins.
    is_stop_ours: bool,
    /// Why the guest is to stay paused at the destination.
    stays_paused: Option<StaysPaused>,
    remark: Option<String>,
}

/// What shall become of the guest at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnArrival {
    /// What the destination does by itself: the guest runs on if it ran, or stays paused if the destination was
    /// started with `-S`.
    #[default]
    AsStarted,
    /// It stays paused until `cont`.
    Paused,
}

/// What becomes of a QEMU source's `return-path`, with both monitors in hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReturnPath {
    /// It is on for the time of the migration.
    #[default]
    On,
    /// It stays as the operator set it.
    AsSet,
}

/// Why a guest stays paused where it has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StaysPaused {
    /// The destination was started with `-S`.
    StartedStopped,
    /// The operator said so.
    Asked,
}

/// What became of a guest that has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrived {
    /// Nobody had a hand in it: it runs, or was not running before.
    ByItself,
    /// It was held and has been started.
    Started,
    /// It ran and is paused now; `cont` at the destination starts it.
    Paused(StaysPaused),
}

/// Refuses a pair that cannot work: the stream names its machine type, and only the same one can load it.
pub fn compare(source: &mut Vm, destination: &mut Vm) -> Result<(), DriveError> {
    let (leaves, arrives) = (source.machine_type()?, destination.machine_type()?);
    if leaves == arrives || leaves.is_empty() || arrives.is_empty() {
        return compare_blocks(source, destination);
    }
    let advice = if source.is_sterna() != destination.is_sterna() {
        "Sterna's own VMM and QEMU are different machines, so a guest cannot migrate between them"
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
    pub fn begin(
        source: &mut Vm,
        mut destination: Option<&mut Vm>,
        on_arrival: OnArrival,
        return_path: ReturnPath,
    ) -> Result<Self, DriveError> {
        let ran = source.run_state()? == "running";
        let mut capabilities = vec![("events", true)];
        let is_held = destination.is_some() && !source.is_sterna();
        if is_held && return_path == ReturnPath::On {
            capabilities.push(("return-path", true));
        }
        let changed = if source.is_sterna() {
            Changed::default()
        } else {
            Settings::read(source)?.change(source, &capabilities, &Map::new())?
        };
        let mut remark = None;
        let is_told = is_held || destination.is_some() && on_arrival == OnArrival::Paused;
        let was_stopped = match destination.as_deref_mut().filter(|_| is_told) {
            Some(destination) => {
                let seen = destination.was_started_stopped();
                if seen.is_none() && on_arrival == OnArrival::AsStarted {
                    remark = Some(format!(
                        "it is unknown whether {} was started with -S, so its guest will be started; \
                         --paused leaves it paused",
                        destination.at()
                    ));
                }
                seen.unwrap_or(false)
            }
            None => false,
        };
        let stays_paused = match on_arrival {
            OnArrival::Paused => Some(StaysPaused::Asked),
            OnArrival::AsStarted => was_stopped.then_some(StaysPaused::StartedStopped),
        };
        if let Some(destination) = destination.filter(|_| is_told)
            && let Err(error) = destination.execute("stop", Value::Null)
        {
            let _ = changed.undo(source);
            return Err(error);
        }
        Ok(Self {
            source: changed,
            ran,
            is_held,
            is_stop_ours: is_told && !was_stopped,
            stays_paused,
            remark,
        })
    }

    /// What the operator should know before anything moves, as a sentence.
    pub fn remark(&self) -> Option<&str> {
        self.remark.as_deref()
    }

    /// Whether the destination's guest waits for our `cont`.
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// Nothing has begun, for the source refused: everything is as before, and the destination waits on for a guest.
    pub fn refused(self, source: &mut Vm, destination: Option<&mut Vm>) {
        if let Some(destination) = destination.filter(|_| self.is_stop_ours) {
            // While it waits, this only takes the `stop` back. If it is gone, there is nothing to take back.
            let _ = destination.execute("cont", Value::Null);
        }
        self.put_back(source);
    }

    /// After the source has said `completed`: starts the guest at the destination, if it ran and was held, unless it is
    /// to stay paused.
    ///
    /// # Errors
    /// [`DriveError::Failed`]: the destination has not taken the guest, which is stopped at the source.
    /// [`DriveError::Undecided`]: it is not known whether it has.
    pub fn completed(self, source: &mut Vm, destination: Option<&mut Vm>) -> Result<Arrived, DriveError> {
        let stays_paused = self.stays_paused.filter(|_| self.ran && destination.is_some());
        let taken = match destination.filter(|_| self.is_held) {
            Some(destination) => take_over(source.at(), destination, self.ran && stays_paused.is_none()),
            None => Ok(Arrived::ByItself),
        };
        self.put_back(source);
        taken.map(|arrived| stays_paused.map_or(arrived, Arrived::Paused))
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

    /// After the source's monitor has gone away in the middle, which need not mean that its process has: what became
    /// of the guest.
    pub fn lost(self, source: &Vm, destination: Option<&mut Vm>) -> DriveError {
        let gone =
            format!("the connection to the source's monitor ({}) was lost during the migration", source.at());
        let Some(destination) = destination else {
            return DriveError::Failed(format!("{gone}; check whether the destination has the guest"));
        };
        let at = destination.at().to_owned();
        let progress = match wait_until_over(destination, Duration::from_secs(2)) {
            Ok(progress) => progress,
            Err(error) => {
                return DriveError::Undecided(format!(
                    "{gone}, and {error}: find out which side has the guest"
                ));
            }
        };
        let held = if self.is_held {
            "; it holds the guest: run `cont` there when it reports `completed` and the source's process has ended"
        } else {
            ""
        };
        match progress.status.as_str() {
            "completed" if self.is_held => DriveError::Undecided(format!(
                "{gone}, but {at} has the complete guest, paused: if the source's process has ended, run \
                 `cont` there"
            )),
            "completed" => DriveError::Failed(format!("{gone}, and {at} has the complete guest")),
            _ if !progress.is_over() => DriveError::Undecided(format!(
                "{gone}, and {at} is still `{}`: the migration may go on; check there again{held}",
                progress.status
            )),
            _ if !destination.is_sterna() => {
                // It waits for nothing any more, and would have ended by itself.
                let _ = destination.execute("quit", Value::Null);
                DriveError::Failed(format!(
                    "{gone} before the whole guest was sent: if its process has ended, the guest is lost"
                ))
            }
            _ => DriveError::Failed(format!(
                "{gone}, and {at} has not received the complete guest: if the source's process has ended, the guest is \
                 lost with it"
            )),
        }
    }

    /// The guest's whereabouts are settled; settings are worth no error.
    fn put_back(self, source: &mut Vm) {
        let _ = self.source.undo(source);
    }
}

/// The source at `source` has sent everything and stands stopped.
fn take_over(source: &str, destination: &mut Vm, starts: bool) -> Result<Arrived, DriveError> {
    let at = destination.at().to_owned();
    let undecided = |why: String| {
        DriveError::Undecided(format!(
            "the source has sent everything, but {why}; the guest is stopped at {source} and held at {at}: run \
             `cont` at exactly one of them, at {at} if it says `completed`"
        ))
    };
    let progress =
        wait_until_over(destination, LOADED_LIMIT).map_err(|error| undecided(error.to_string()))?;
    if progress.status == "completed" {
        if !starts {
            return Ok(Arrived::ByItself);
        }
        destination.execute("cont", Value::Null).map_err(|error| undecided(error.to_string()))?;
        return Ok(Arrived::Started);
    }
    if !progress.is_over() {
        return Err(undecided(format!("{at} is still `{}`", progress.status)));
    }
    Err(DriveError::Failed(format!(
        "the source has sent everything, but {at} reports `{}`{}; the guest is stopped at the source: `cont` there lets \
         it run on",
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
