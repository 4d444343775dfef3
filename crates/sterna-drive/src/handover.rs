//! Decides which guest may run when one program controls both monitors.
//!
//! A QEMU source that misses the destination's SHUT resumes its guest by itself. If the destination has started the
//! guest too, two guests run on one disk. So this program prevents the destination from starting its guest: it sends
//! `stop` while the destination waits. It sends `cont` only after the source has reported `completed`
//! (docs/design/handover.md). Between two Sternas the engine guarantees this, and the destination is not stopped.
//!
//! After our `stop`, the monitor does not show any more whether the destination was started with `-S`, which would
//! leave its guest paused. So [`Vm::was_started_stopped`] is called before. If it was, no `cont` is sent.
//!
//! Without `return-path`, a QEMU source reports `completed` as soon as its last byte is written. So `return-path` is
//! switched on during the migration at every QEMU source that has it, except where [`ReturnPath`] says otherwise. If
//! the destination dies, such a source reports a failure and resumes its guest.
//!
//! Without a return path, this program asks the destination's monitor before it sends `cont` there. A guest that did
//! not arrive stays stopped at its source until an operator sends `cont` there. Without a return path and without the
//! destination's monitor, `completed` proves nothing: [`Handover::unconfirmed`] gives the reason, and the outcome is
//! [`Arrived::Unconfirmed`].

use std::time::{Duration, Instant};

use serde_json::Value;

use super::{DriveError, Progress, Temporary, Vm, blocks, readiness};

/// How long a destination may need to report that all is loaded, after the source's `completed`.
const LOADED_LIMIT: Duration = Duration::from_secs(30);

/// One migration between two monitored VMs.
#[derive(Debug)]
pub struct Handover {
    ran: bool,
    is_held: bool,
    /// This program sent the destination its first `stop`. It is undone if no migration starts.
    is_stop_ours: bool,
    /// The reason why the guest stays paused at the destination.
    stays_paused: Option<StaysPaused>,
    remark: Option<String>,
    /// The reason why the source's `completed` does not prove the guest's arrival. None if it does.
    unconfirmed: Option<String>,
}

/// The run state that the guest gets at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnArrival {
    /// The guest runs at the destination if it ran at the source. It stays paused if the destination was started
    /// with `-S`.
    #[default]
    AsStarted,
    /// The guest stays paused until `cont`.
    Paused,
}

/// The use of a QEMU source's capability `return-path`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReturnPath {
    /// Switched on during the migration.
    #[default]
    On,
    /// Unchanged from the operator's setting.
    AsSet,
    /// Switched off during the migration, because the address works in one direction only. QEMU would wait for an
    /// answer that cannot arrive, and could not be cancelled (observed: 7.2.22 and 11.1.3 with `exec:`).
    Impossible,
}

impl ReturnPath {
    /// The use over an address such as `tcp:HOST:PORT`. A command (`exec:`) and a file (`file:`) have no return
    /// direction. A descriptor (`fd:`) may be a socket or a pipe.
    pub fn over(address: &str) -> Self {
        match address.split_once(':') {
            Some(("exec" | "file", _)) => Self::Impossible,
            Some(("fd", _)) => Self::AsSet,
            _ => Self::On,
        }
    }
}

/// The reason why a guest stays paused at its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StaysPaused {
    /// The destination was started with `-S`.
    StartedStopped,
    /// The operator requested it.
    Asked,
}

/// The result for a guest that has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrived {
    /// The destination decided alone: the guest runs, or was not running before.
    ByItself,
    /// The destination was prevented from starting the guest, and has now received `cont`.
    Started,
    /// The guest ran before and is paused now. `cont` at the destination starts it.
    Paused(StaysPaused),
    /// The source has sent everything and stopped its guest. It is unknown whether the guest has arrived.
    Unconfirmed,
}

/// Refuses two VMs with different machine types. Only the machine type that the stream names can load it.
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

/// Compares the RAM blocks of both VMs. Both need the same blocks, of the same size unless they can grow. QEMU prints
/// its own error only to the destination's standard error, and does not report an additional block at the
/// destination, which would stay empty. Sterna compares the blocks itself.
fn compare_blocks(source: &mut Vm, destination: &mut Vm) -> Result<(), DriveError> {
    if destination.is_sterna() {
        return Ok(());
    }
    let (Some(leaves), Some(arrives)) = (source.blocks()?, destination.blocks()?) else { return Ok(()) };
    match blocks::misfit(&leaves, &arrives, source.at(), destination.at()) {
        Some(why) => Err(DriveError::Unfit(why)),
        None => Ok(()),
    }
}

impl Handover {
    /// Called before `migrate`: prepares `source`, and stops `destination` if its guest must not start by itself.
    /// The caller has already made the operator's settings. `settings` belongs to the source and records the changes
    /// made here.
    pub fn begin(
        source: &mut Vm,
        settings: &mut Temporary,
        mut destination: Option<&mut Vm>,
        on_arrival: OnArrival,
        return_path: ReturnPath,
    ) -> Result<Self, DriveError> {
        let ran = source.run_state()? == "running";
        let mut capabilities = vec![("events", true)];
        let is_held = destination.is_some() && !source.is_sterna();
        // Sterna has `return-path` on by default, and detects whether an address has a return direction.
        if !source.is_sterna() && return_path != ReturnPath::AsSet {
            capabilities.push(("return-path", return_path == ReturnPath::On));
        }
        settings.switch(source, &capabilities).map_err(|error| source.error(error))?;
        let unconfirmed = match settings.capability("return-path") {
            _ if return_path == ReturnPath::Impossible => {
                Some("this kind of address has no return path".to_owned())
            }
            Some(true) => None,
            Some(false) => Some(format!("return-path is off at {}", source.at())),
            None => Some(format!("{} ({}) has no return path", source.at(), source.version())),
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
        if let Some(destination) = destination.filter(|_| is_told) {
            destination.execute("stop", Value::Null)?;
        }
        Ok(Self { ran, is_held, is_stop_ours: is_told && !was_stopped, stays_paused, remark, unconfirmed })
    }

    /// A sentence that the operator should read before the migration starts.
    pub fn remark(&self) -> Option<&str> {
        self.remark.as_deref()
    }

    /// Whether the guest ran at the source before the migration.
    pub fn ran(&self) -> bool {
        self.ran
    }

    /// Whether `cont` is due at the destination as soon as the source has switched to postcopy. From then on the
    /// source never runs the guest again.
    pub fn starts_at_switch(&self) -> bool {
        self.is_held && self.ran && self.stays_paused.is_none()
    }

    /// Whether the destination starts the guest only after our `cont`.
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// The reason why the source's `completed` does not prove the guest's arrival. None if it does.
    pub fn unconfirmed(&self) -> Option<&str> {
        self.unconfirmed.as_deref()
    }

    /// Undoes the preparation after the source refused to migrate: the destination waits for a guest as before.
    pub fn refused(self, destination: Option<&mut Vm>) {
        if let Some(destination) = destination.filter(|_| self.is_stop_ours) {
            // While the destination waits, `cont` only undoes the `stop`. If it has ended, nothing must be undone.
            let _ = destination.execute("cont", Value::Null);
        }
    }

    /// Called after the source has reported `completed`. Starts the guest at the destination if it ran before and
    /// must not stay paused.
    ///
    /// # Errors
    /// [`DriveError::Failed`]: the destination has not received the guest, which is stopped at the source.
    /// [`DriveError::Undecided`]: it is unknown whether the destination has received the guest.
    pub fn completed(self, source: &Vm, destination: Option<&mut Vm>) -> Result<Arrived, DriveError> {
        let stays_paused = self.stays_paused.filter(|_| self.ran && destination.is_some());
        let Some(destination) = destination else {
            return Ok(if self.unconfirmed.is_some() { Arrived::Unconfirmed } else { Arrived::ByItself });
        };
        let taken = match self.is_held || self.unconfirmed.is_some() {
            true => take_over(source.at(), destination, self.is_held && self.ran && stays_paused.is_none()),
            false => Ok(Arrived::ByItself),
        };
        taken.map(|arrived| stays_paused.map_or(arrived, Arrived::Paused))
    }

    /// Called after a failure or a cancel: asks the destination for the reason. Ends a QEMU that no longer waits for a
    /// guest, as it would have ended by itself. A QEMU that no source has reached continues to wait. Returns the
    /// destination's reason as the end of a sentence.
    pub fn failed(self, destination: Option<&mut Vm>) -> Option<String> {
        let destination = destination?;
        let at = destination.at().to_owned();
        let asked = wait_until_over(destination, Duration::from_secs(2))
            .and_then(|progress| Ok((progress, destination.execute("query-migrate", Value::Null)?)));
        let (progress, query) = match asked {
            Ok(asked) => asked,
            Err(error) if error.is_disconnect() => {
                return Some(format!("the destination at {at} has ended; its log contains the reason"));
            }
            Err(error) => return Some(format!("the destination does not report why ({error})")),
        };
        if destination.is_sterna() {
            // A Sterna waits for the next source by itself.
            let is_over = progress.is_over();
            return progress.error.filter(|_| is_over).map(reported);
        }
        if readiness::listens(&query) {
            self.refused(Some(destination));
            return None;
        }
        // In postcopy only this process has the guest.
        if !progress.status.starts_with("postcopy") {
            let _ = destination.execute("quit", Value::Null);
        }
        progress.error.map(reported)
    }

    /// Finds out which side has the guest after the connection to the source's monitor was lost. The source's process
    /// need not have ended.
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
                "{gone}, and {at} is still `{}`: the migration may continue; check there again{held}",
                progress.status
            )),
            _ if !destination.is_sterna() => {
                // This QEMU waits for nothing any more, and would have ended by itself.
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
}

fn reported(reason: String) -> String {
    format!("the destination reports: {reason}")
}

/// Completes a handover after the source at `source` has sent everything and stopped its guest.
fn take_over(source: &str, destination: &mut Vm, starts: bool) -> Result<Arrived, DriveError> {
    let at = destination.at().to_owned();
    let undecided = |why: String| {
        DriveError::Undecided(format!(
            "the source has sent everything, but {why}; the guest is stopped at {source} and held at {at}: run `cont` \
             at exactly one of them, at {at} if its status is `completed`"
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
        "the source has sent everything, but {at} reports `{}`{}; the guest is stopped at the source: `cont` there \
         resumes it",
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
