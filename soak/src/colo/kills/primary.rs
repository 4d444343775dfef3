//! The primary of a case, in a process of its own.
//!
//! Standard output carries only the guest's output. Its packets go to the observer. Reports to the judge go
//! to standard error, one per line. Orders arrive on standard input. The process exits at the end of its
//! input, so that no process outlives the soak.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use sterna::{Address, AskCheckpoint, RunState, SourceVm};
use sterna_arbiter::{Claim, Claimant, Generation, GuestName, Role, Spec};
use sterna_guests::ProcessGuest;
use sterna_standby::machines::Ruling;
use sterna_standby::{Claims, EpochGate, GateStatistics, JoinedGate, MaySay, PacketGate, Primary};

use super::account::{self, Account};
use super::blow::{Kill, Planted, When};
use super::packets;
use crate::colo::play::until;
use crate::colo::vm::{Callback, Deed, Plans, Troubled};
use crate::colo::voice::Voice;

/// First command-line argument of a primary's process.
pub const ROLE: &str = "--kills-primary";

/// Time limit of the arbiter's answer.
const ARBITER: Duration = Duration::from_secs(10);
/// Time for which the primary waits in a named state. A judge on a busy host can act in it.
const STANDS: Duration = Duration::from_secs(1);
/// Time for which output waits in the middle of a piece. It is shorter than a lease, so that a primary that
/// wakes writes the rest immediately.
const PIECE: Duration = Duration::from_millis(100);

/// Runs the primary. `arguments` are the arguments after [`ROLE`].
///
/// # Errors
/// The reason why the primary cannot take part.
pub fn main(arguments: &[String]) -> Result<(), String> {
    let [seed, number, again, address, arbiter, observer, planted @ ..] = arguments else {
        return Err(
            "a primary needs: seed, number, how often it was played, address, arbiter, observer".into()
        );
    };
    let parse = |text: &String| text.parse::<u64>().map_err(|_| format!("{text:?} is no number"));
    let kill = Kill::new(parse(seed)?, parse(number)?, parse(again)?);
    let address: Address = address.parse().map_err(|error| format!("{address:?}: {error}"))?;
    let planted = planted.first().and_then(|label| Planted::of_label(label));
    let guest = ProcessGuest::boot(kill.case.guest.clone()).map_err(|error| error.to_string())?;
    let _account = Account::of(&guest, |account| say(&format!("{} {account}", account::WORD)));
    guest.cont().map_err(|error| error.to_string())?;

    let (tell, told) = channel();
    let awaited = Arc::new(AtomicU64::new(0));
    let voice = Voice::writing(&guest, {
        let (awaited, tell) = (Arc::clone(&awaited), tell.clone());
        move |bytes| {
            leave(bytes, &awaited, || {
                // The receiver may have ended, because the state was awaited for a limited time.
                let _ = tell.send(());
            })
        }
    })?;
    let plans = Arc::<Plans>::default();
    let mut claims = claims(arbiter, Role::Primary)?;
    let cards = Arc::new(PacketGate::new(1 << 20).map_err(|error| error.to_string())?);
    packets::send(&guest, &cards, observer.parse().map_err(|error| format!("{observer:?}: {error}"))?)?;
    let (mut console, mut cards) =
        (Arc::clone(&voice.gate) as Arc<dyn EpochGate>, cards as Arc<dyn EpochGate>);
    match planted {
        Some(Planted::ReleasesOnTaken) => console = Arc::new(Leaky(console)),
        Some(Planted::SendsOnTaken) => cards = Arc::new(Leaky(cards)),
        Some(Planted::BelievesItWon) => claims = Arc::new(|| Ok(Ruling::Won)),
        None => {}
    }
    let gate = Arc::new(JoinedGate::new(console, vec![cards]));
    let vm = Troubled::new(&guest, &plans) as Arc<dyn SourceVm>;
    let primary = kill.case.primary(vm, &address, gate, claims)?;

    std::thread::spawn(move || told.into_iter().for_each(|()| say("reached")));
    std::thread::spawn({
        let primary = primary.clone();
        move || {
            let outcome = primary.wait();
            let (runs, may) = (guest.run_state() == RunState::Running, primary.migration().may_guest_run());
            say(&format!("ended {outcome:?} {runs} {may}"));
        }
    });
    for line in std::io::stdin().lines().map_while(Result::ok) {
        if line != "arm" {
            return Err(format!("what is {line:?}?"));
        }
        let stands = Deed::Tell(tell.clone(), STANDS);
        match kill.when {
            When::After(_) => {}
            When::Stopping(calls) => plans.add(Callback::Stop, calls, stands),
            When::Saving(calls) => plans.add(Callback::Save, calls, stands),
            When::Resuming(calls) => plans.add(Callback::Resume, calls, stands),
            When::Saying(pieces) => awaited.store(pieces, Ordering::SeqCst),
            When::HandingOver(_) => hand_over(&primary)?,
        }
        say("armed");
    }
    // Exits without joining threads: pending output is not needed, because the judge has gone or has seen
    // enough.
    std::process::exit(0);
}

/// Requests a planned takeover as soon as it is possible. The standby holds a checkpoint before the primary
/// knows it.
fn hand_over(primary: &Primary) -> Result<(), String> {
    until(|| primary.state().outcome.is_some() || primary.statistics().held > 0)?;
    // Refused if the protection has ended. Another thread reports that end.
    let _ = primary.hand_over();
    Ok(())
}

/// Writes a piece of output. An awaited piece waits after its first half.
fn leave(bytes: &[u8], awaited: &AtomicU64, reached: impl Fn()) {
    let less = |left: u64| left.checked_sub(1);
    let is_awaited = awaited.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less) == Ok(1);
    let (first, rest) = bytes.split_at(if is_awaited { bytes.len() / 2 } else { 0 });
    let mut output = std::io::stdout().lock();
    // The observer may have closed the pipe.
    let _ = output.write_all(first).and_then(|()| output.flush());
    if is_awaited {
        reached();
        std::thread::sleep(PIECE);
    }
    let _ = output.write_all(rest).and_then(|()| output.flush());
}

fn say(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Claims of a case, with an arbiter that both sides can reach.
pub(super) fn claims(spec: &str, role: Role) -> Result<Arc<dyn Claims>, String> {
    let spec: Spec = spec.parse().map_err(|error| format!("{spec:?}: {error}"))?;
    let opened = spec.open(ARBITER).map_err(|error| error.to_string())?;
    let claim = Claim {
        guest: GuestName::of_id([7; 16]),
        generation: Generation::new(1),
        claimant: Claimant::of_this_process(role),
    };
    Ok(Arc::new(move || match opened.arbiter.claim(&claim) {
        Ok(sterna_arbiter::Ruling::Won) => Ok(Ruling::Won),
        Ok(sterna_arbiter::Ruling::Lost { .. }) => Ok(Ruling::Lost),
        Err(error) => Err(error.to_string()),
    }))
}

/// A faulty gate: it releases output when its checkpoint is taken, without a check.
struct Leaky(Arc<dyn EpochGate>);

impl EpochGate for Leaky {
    fn close(&self, _: MaySay) {
        self.0.close(Box::new(|_| true));
    }
    fn end_epoch(&self, epoch: u64) {
        self.0.end_epoch(epoch);
        self.0.release(epoch);
        self.0.let_out(STANDS);
    }
    fn release(&self, epoch: u64) {
        self.0.release(epoch);
    }
    fn let_out(&self, most: Duration) {
        self.0.let_out(most);
    }
    fn open(&self) {
        self.0.open();
    }
    fn drop_output(&self) {
        self.0.drop_output();
    }
    fn ask_when_full(&self, ask: AskCheckpoint) {
        self.0.ask_when_full(ask);
    }
    fn unsaid(&self) -> (u64, Vec<u8>) {
        self.0.unsaid()
    }
    fn waits_since(&self) -> Option<std::time::Instant> {
        self.0.waits_since()
    }
    fn statistics(&self) -> GateStatistics {
        self.0.statistics()
    }
}
