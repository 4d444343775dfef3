//! The steps of a live save.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_ram::DirtyBitmaps;
use sterna_transport::IoPart;
use sterna_wire::extension;

use super::held::{Held, HeldMemory};
use super::options::{LiveSaved, Snapshot};
use super::pages::Sender;
use super::shared::Shared;
use super::target::{Later, Target};
use crate::error::MigrationError;
use crate::events::Status;
use crate::outgoing::guest_source::{GuestSource, LiveVm};
use crate::outgoing::main_stream::{MainStream, Sink};
use crate::outgoing::whole_memory::await_whole;
use crate::threads::{call, caught, tried};
use crate::vm::RunState;

/// Saves the guest. It runs when this returns, if it ran before.
pub(super) fn save(shared: &Arc<Shared>) -> Result<LiveSaved, MigrationError> {
    let source = LiveVm::new(Arc::clone(&shared.vm));
    let params = shared.params();
    let open = || Target::open(&shared.to, &params, &shared.cancel, |channel| shared.adopt(channel));
    // The end of a program that has the other end of a descriptor is noticed while the memory is loaded. Any other peer would
    // wait for the first byte, which it may not do for long.
    let early = if shared.to.is_descriptor() { Some(open()?) } else { None };
    await_whole(&shared.ram, || {
        shared.check()?;
        early.as_ref().map_or(Ok(()), Target::check)
    })?;
    let target = early.map_or_else(open, Ok)?;
    let later = Later::new(target.sink());
    let mut main = MainStream::new(later.clone() as _, Arc::clone(&shared.counters), source.section_ids());
    main.greet(source.configuration())?;
    if let Some(record) = shared.vm.compatibility() {
        let body = call("Device::save of the compatibility record", || record.save())?;
        main.full_section((extension::COMPATIBILITY_SECTION, 0, record.version()), &body, true)?;
    }
    main.ram_start(&source.blocks(), false)?;

    let limits = (shared.options.buffer_bytes, shared.options.longest_hold);
    let interrupted = Arc::downgrade(shared);
    let interrupt = move || {
        if let Some(shared) = interrupted.upgrade() {
            shared.interrupt();
        }
    };
    let memory = HeldMemory::begin(&shared.ram, limits, interrupt)?;
    let held = memory.held();
    held.check()?;
    shared.status(Status::Active);
    let changes = shared.options.changes.as_ref();
    let first = match changes {
        Some(snapshot) => {
            snapshot.log.read()?;
            snapshot.log.changed_since(snapshot.since)
        }
        None => {
            let all = DirtyBitmaps::new(&shared.ram);
            all.set_all();
            Some(all)
        }
    };
    let pages = first.ok_or_else(unknown_base)?;
    held.protect_ahead(&pages, || shared.check())?;
    let moment = pause(shared, &source, &mut main, &later, (held, pages))?;
    shared.paused(moment.pause);

    let sent = send(shared, &source, &mut main, &later, held, &moment).and_then(|()| target.complete());
    // If the memory could not be held any more, that is the cause of the interrupted target, too.
    let sent = sent.map_err(|error| held.failure().err().unwrap_or(error));
    let writes = held.writes();
    // Writers continue, whatever happened.
    drop(memory);
    if let (Err(_), Some(number), Some(snapshot)) = (&sent, moment.number, changes) {
        snapshot.log.forget(number);
    }
    sent?;
    let counts = shared.counters.now();
    Ok(LiveSaved {
        pause: moment.pause,
        run_state: moment.run_state,
        number: moment.number,
        bytes: counts.main_bytes,
        normal_pages: counts.normal_pages,
        zero_pages: counts.zero_pages,
        held_writes: writes,
    })
}

fn unknown_base() -> MigrationError {
    MigrationError::System(
        "the changes since the base are not known any more (a migration, a restart of the VM, or a failed dirty log): save \
         the whole guest"
            .to_owned(),
        None,
    )
}

/// The state at the pause.
struct Moment {
    pages: DirtyBitmaps,
    /// The devices' sections.
    devices: Vec<u8>,
    run_state: RunState,
    pause: Duration,
    /// The number in the change log.
    number: Option<u64>,
}

/// Pauses the guest, saves its devices, and holds its memory.
fn pause(
    shared: &Shared,
    source: &LiveVm,
    main: &mut MainStream,
    later: &Later,
    (held, pages): (&Held, DirtyBitmaps),
) -> Result<Moment, MigrationError> {
    let act = || {
        let began = Instant::now();
        let was_running = call("SourceVm::run_state", || shared.vm.run_state()) == RunState::Running;
        later.keep();
        let taken = caught("the pause of the live save", || {
            call("SourceVm::stop", || shared.vm.stop())?;
            moment(shared, source, main, (held, pages), was_running)
        });
        let devices = later.take();
        // Also after an error or a panic, which may have come after the stop.
        let resumed = match was_running {
            true => resume(shared),
            false => Ok(()),
        };
        let pause = began.elapsed();
        let (pages, number) = taken.and_then(|taken| taken)?;
        resumed?;
        let run_state = if was_running { RunState::Running } else { RunState::Paused };
        Ok(Moment { pages, devices, run_state, pause, number })
    };
    // An operator's `stop` or `cont` waits for the pause. A migration cannot have the guest meanwhile.
    shared.ram.while_free(act).unwrap_or_else(|custody| {
        Err(MigrationError::Internal(format!("a live save without its guest ({custody:?})")))
    })
}

fn moment(
    shared: &Shared,
    source: &LiveVm,
    main: &mut MainStream,
    (held, mut pages): (&Held, DirtyBitmaps),
    was_running: bool,
) -> Result<(DirtyBitmaps, Option<u64>), MigrationError> {
    call("SourceVm::quiesce", || shared.vm.quiesce())?;
    let late = match &shared.options.changes {
        Some(snapshot) => Some(snapshot.log.read()?),
        None => None,
    };
    if let Some(late) = &late {
        pages.or_from(late);
    }
    held.hold(&pages, late.as_ref())?;
    MigrationError::check_same_ram(&call("Vm::ram", || shared.vm.ram()), &shared.ram)?;
    MigrationError::check_memory(&shared.ram)?;
    source.send_devices(main, if was_running { "running" } else { "paused" })?;
    let mark = |snapshot: &Snapshot| snapshot.log.mark(snapshot.since);
    Ok((pages, shared.options.changes.as_ref().map(mark)))
}

fn resume(shared: &Shared) -> Result<(), MigrationError> {
    let again = || tried("SourceVm::resume", || call("SourceVm::resume", || shared.vm.resume()));
    // A second attempt, because nothing else resumes the guest.
    again().or_else(|_| again())
}

fn send(
    shared: &Shared,
    source: &LiveVm,
    main: &mut MainStream,
    later: &Later,
    held: &Held,
    moment: &Moment,
) -> Result<(), MigrationError> {
    Sender { shared, held, main }.send(&moment.pages)?;
    source.send_switchover_start(main)?;
    main.ram_part(true, false)?;
    shared.status(Status::Device);
    // The sections have their numbers and their lengths already, so their bytes follow as they are.
    later.write_parts(&[IoPart::Bytes(&moment.devices)])?;
    source.send_end(main)?;
    shared.check()
}
