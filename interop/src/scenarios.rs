//! Scenarios that move a guest between two machines of this process. The guest must not notice the move.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::{SourceVm, TargetVm, Vm};
use sterna_ram::PageBitmap;
use sterna_vmm::{GuestImage, KvmMachine, MachineConfig};

use crate::guests::{self, BOARD, clock, timer};

/// A description of a scenario's failure.
pub type Failure = String;

/// A guest, its moves, and the checks afterwards.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Name of the scenario in reports.
    pub name: &'static str,
    /// Whether it runs on a KVM that only emulates integer instructions.
    pub plain: bool,
    /// Function that runs the scenario.
    pub run: fn() -> Result<(), Failure>,
}

/// All scenarios.
pub const ALL: &[Scenario] = &[
    Scenario { name: "periodic_timers_go_on", plain: true, run: periodic_timers },
    Scenario { name: "pending_one_shot_fires_once", plain: true, run: one_shot },
    Scenario {
        name: "pending_deadline_fires_once_and_not_early",
        plain: true,
        run: || deadline(Duration::ZERO),
    },
    Scenario { name: "deadline_passed_while_stopped_fires_once", plain: true, run: || deadline(PAUSE * 3) },
    Scenario { name: "clocks_go_on_and_show_the_downtime", plain: true, run: clocks },
    Scenario { name: "registers_keep_their_values", plain: false, run: registers },
];

/// Time for which a guest is stopped in scenarios in which it must notice.
const PAUSE: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_secs(60);

fn periodic_timers() -> Result<(), Failure> {
    // 1 GHz / 16 / 625,000 is 100 Hz, the same as the PIT.
    let mut here = started(guests::timer_guest(), vec![timer::PERIODIC, 625_000])?;
    for _ in 0..5 {
        grows(&here, timer::LAPIC_TICKS, 3)?;
        grows(&here, timer::PIT_TICKS, 3)?;
        here = moved(&here, Duration::ZERO)?;
    }
    grows(&here, timer::LAPIC_TICKS, 3)?;
    grows(&here, timer::PIT_TICKS, 3)?;
    grows(&here, timer::HEARTBEAT, 3)
}

fn one_shot() -> Result<(), Failure> {
    // 1 GHz / 16: 2 s, much longer than the time to stop the guest.
    pending(vec![timer::ONE_SHOT, 125_000_000], Duration::ZERO).map(|_| ())
}

/// Tests a deadline. The guest is stopped for `stopped`; if that is not zero, the deadline is after 2/3 of
/// it.
fn deadline(stopped: Duration) -> Result<(), Failure> {
    let ahead = if stopped.is_zero() { Duration::from_secs(2) } else { stopped * 2 / 3 };
    let khz = tsc_khz()?;
    let machine = pending(vec![timer::TSC_DEADLINE, khz * ahead.as_millis() as u64], stopped)?;
    let (wanted, fired) = (board(&machine, timer::DEADLINE)?, board(&machine, timer::FIRED)?);
    // A kernel may inject the interrupt some µs early, to meet the deadline on entry.
    ensure(fired + khz > wanted, || format!("it fired {} ticks early", wanted - fired))
}

/// Moves a guest whose timer has not fired yet. The timer must fire at the destination, and only once.
fn pending(parameters: Vec<u64>, stopped: Duration) -> Result<Arc<KvmMachine>, Failure> {
    let here = started(guests::timer_guest(), parameters)?;
    reaches(&here, timer::ARMED, 1)?;
    here.stop();
    ensure(board(&here, timer::LAPIC_TICKS)? == 0, || "it fired before it could be moved: too slow".into())?;
    let there = moved(&here, stopped)?;
    reaches(&there, timer::LAPIC_TICKS, 1)?;
    grows(&there, timer::PIT_TICKS, 10)?;
    let ticks = board(&there, timer::LAPIC_TICKS)?;
    ensure(ticks == 1, || format!("it fired {ticks} times"))?;
    Ok(there)
}

fn clocks() -> Result<(), Failure> {
    let here = started(guests::clock_guest(), vec![])?;
    grows(&here, clock::HEARTBEAT, 100)?;
    // This is much longer than the run time of the target's own clocks. Clocks that are not set would go
    // back.
    std::thread::sleep(PAUSE * 4);
    let before = Instant::now();
    let there = moved(&here, PAUSE)?;
    grows(&there, clock::HEARTBEAT, 100)?;
    let most = before.elapsed();
    let tsc_gap = Duration::from_micros(board(&there, clock::TSC_GAP)? * 1000 / tsc_khz()?);
    let clock_gap = Duration::from_nanos(board(&there, clock::NANOSECONDS_GAP)?);
    // The gap that the guest sees is between the certain time of its stop and the duration of the complete
    // move.
    for (name, gap) in [("TSC", tsc_gap), ("kvmclock", clock_gap)] {
        ensure(gap >= PAUSE * 95 / 100, || format!("{name} jumped {gap:?} while {PAUSE:?} passed and more"))?;
        ensure(gap <= most * 105 / 100, || format!("{name} jumped {gap:?} while at most {most:?} passed"))?;
    }
    Ok(())
}

fn registers() -> Result<(), Failure> {
    let here = started(guests::register_guest(), vec![])?;
    reaches(&here, guests::REGISTERS_READY, 1)?;
    here.stop();
    let go = here.ram().block(0).write_u64(BOARD + guests::REGISTERS_GO, 1);
    go.map_err(|error| error.to_string())?;
    // Under QEMU 7.2's TCG, a nested guest's XSETBV bypasses KVM, so KVM does not know the guest's value. It
    // is set in the state. On other hosts this changes nothing.
    let mut here = moved_with(&here, Duration::ZERO, set_xcr0)?;
    for _ in 0..10 {
        grows(&here, guests::REGISTERS_HEARTBEAT, 100)?;
        here = moved(&here, Duration::ZERO)?;
    }
    grows(&here, guests::REGISTERS_HEARTBEAT, 100)
}

/// Sets XCR0 to x87, SSE and AVX in a vCPU's body: field `xcrs`, count and flags, then number and value.
fn set_xcr0(body: &mut [u8]) {
    if let Some(at) = body.windows(8).position(|window| window == b"xcrs\x88\x01\x00\x00") {
        body[at + 8 + 16..at + 8 + 24].copy_from_slice(&7u64.to_le_bytes());
    }
}

fn tsc_khz() -> Result<u64, Failure> {
    let machine = machine(Some(GuestImage::Flat64 { code: vec![0xf4], parameters: vec![] }))?;
    let at = sterna_vmm::layout::BOOT_PARAMETERS + 24;
    machine.ram().block(0).read_u64(at).map_err(|error| error.to_string())
}

/// A machine with a stopped guest, or one that waits for a guest.
fn machine(guest: Option<GuestImage>) -> Result<Arc<KvmMachine>, Failure> {
    let config = MachineConfig { incoming: guest.is_none(), guest, ..MachineConfig::new("scenario") };
    KvmMachine::new(config).map_err(|error| error.to_string())
}

fn started(code: Vec<u8>, parameters: Vec<u64>) -> Result<Arc<KvmMachine>, Failure> {
    let machine = machine(Some(GuestImage::Flat64 { code, parameters }))?;
    machine.resume().map_err(|error| error.to_string())?;
    Ok(machine)
}

/// Moves the guest to a new machine. It is stopped for `stopped` between saving and loading.
fn moved(from: &KvmMachine, stopped: Duration) -> Result<Arc<KvmMachine>, Failure> {
    moved_with(from, stopped, |_| ())
}

/// Like [`moved`], and changes every body on the way.
fn moved_with(from: &KvmMachine, stopped: Duration, edit: fn(&mut [u8])) -> Result<Arc<KvmMachine>, Failure> {
    let move_it = || -> Result<Arc<KvmMachine>, sterna::VmError> {
        let to = machine(None).map_err(|error| sterna::VmError::new("target", error))?;
        SourceVm::stop(from)?;
        to.compatibility().load(1, &from.compatibility().save()?)?;
        copy_ram(from, &to).map_err(|error| sterna::VmError::new("RAM", error))?;
        let bodies: Result<Vec<_>, _> = from.devices().iter().map(|device| device.save()).collect();
        std::thread::sleep(stopped);
        for (device, mut body) in to.devices().iter().zip(bodies?) {
            edit(&mut body);
            device.load(device.version(), &body)?;
        }
        Vm::hooks(&*to).iter().try_for_each(|hook| hook.acquire())?;
        TargetVm::start(&*to)?;
        Ok(to)
    };
    move_it().map_err(|error| error.to_string())
}

fn copy_ram(from: &KvmMachine, to: &KvmMachine) -> Result<(), sterna_ram::RamError> {
    let mut page = vec![0; sterna_ram::PAGE_SIZE];
    for (source, target) in from.ram().blocks().iter().zip(to.ram().blocks()) {
        let absent = PageBitmap::new(source.pages());
        source.mark_absent(0, source.pages(), &absent)?;
        for index in (0..source.pages()).filter(|index| !absent.get(*index)) {
            source.read(index * page.len() as u64, &mut page)?;
            target.write(index * page.len() as u64, &page)?;
        }
    }
    Ok(())
}

fn board(machine: &KvmMachine, word: u64) -> Result<u64, Failure> {
    machine.ram().block(0).read_u64(BOARD + word).map_err(|error| error.to_string())
}

fn grows(machine: &KvmMachine, word: u64, by: u64) -> Result<(), Failure> {
    reaches(machine, word, board(machine, word)? + by)
}

/// Waits until a word of the board is at least `value`. Fails if the guest has ended or hangs.
fn reaches(machine: &KvmMachine, word: u64, value: u64) -> Result<(), Failure> {
    let begin = Instant::now();
    while board(machine, word)? < value {
        if let Some(reason) = machine.ended() {
            return Err(reason.to_string());
        }
        ensure(begin.elapsed() < PATIENCE, || format!("word {word} of the board did not reach {value}"))?;
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

pub(crate) fn ensure(holds: bool, why: impl FnOnce() -> Failure) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(why()) }
}
