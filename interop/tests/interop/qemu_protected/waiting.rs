//! The guest continues in a QEMU that waits for it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sterna::error::VmError;
use sterna::{Address, Capabilities, Parameters};
use sterna_drive::waiting::WaitingVm;
use sterna_image::{MappedOptions, Shape};
use sterna_interop::qemu::PATIENCE;
use sterna_interop::ticks::unbroken_serials;
use sterna_interop::{Builder, Failure, Guest, Qemu, Ram, Root, sterna, sterna_does};
use sterna_opaque::ImagePlan;
use sterna_qmp::{Client, Endpoint};
use sterna_standby::{
    HeldDevice, HeldGuest, ImageSurvivor, OperatorsWord, Standby, StandbyOptions, StandbyState, Survivor,
};

use super::{Protected, wait};

/// A VM that this test must end.
struct Ours(u32);

impl Drop for Ours {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.0 as i32) {
            // An error means that the process has ended by itself.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// The command line of a VM that waits, with its files in `directory`.
fn command(builder: &Builder, directory: &Path) -> Result<Vec<std::ffi::OsString>, Failure> {
    let command = builder.command_in(directory)?;
    let program = std::iter::once(command.get_program().to_owned());
    Ok(program.chain(command.get_args().map(ToOwned::to_owned)).collect())
}

/// Checks that the count of the primary's guest continues in the VM in `directory`.
fn counts_on(directory: &Path, primary: &Qemu) -> Result<(), Failure> {
    let serial = directory.join("serial");
    let read = || std::fs::read_to_string(&serial).unwrap_or_default();
    wait("ticks of the survivor", || read().matches("checksum ").count() >= 3)?;
    unbroken_serials(&[&read()])?;
    let first = sterna_interop::ticks::ticks(&read())[0].number;
    let last = primary.ticks().last().map_or(0, |tick| tick.number);
    if first <= 2 || first > last + 1 {
        return Err(format!("the survivor goes on with tick {first}, the primary had come to {last}"));
    }
    Ok(())
}

/// The image and the VM that both receive the guest. It compares them before the VM's guest runs.
struct Watched {
    builder: Builder,
    vm: WaitingVm,
    image: ImageSurvivor,
    directory: PathBuf,
    ram: parking_lot::Mutex<Vec<u8>>,
}

impl Watched {
    /// Checks that a save of the VM would equal the image.
    fn check(&self) -> Result<(), Failure> {
        let ram = std::fs::read(self.directory.join("ram")).map_err(|error| error.to_string())?;
        let wanted = self.ram.lock();
        let differ =
            ram.chunks(4096).zip(wanted.chunks(4096)).filter(|(ours, theirs)| ours != theirs).count();
        if differ > 0 || ram.len() != wanted.len() {
            return Err(format!("{differ} pages differ from the primary's"));
        }
        let at = |name: &str| self.directory.join(name).display().to_string();
        sterna_does(&["save", &at("operator"), &at("saved")])?;
        // Loading changes a few fields. The reference is therefore a machine that has loaded the image.
        let reference = self.builder.clone().incoming_defer().spawn()?;
        let monitor = reference.operator_socket().display().to_string();
        sterna_does(&["restore", &at("image"), &monitor, "--paused"])?;
        sterna_does(&["save", &monitor, &at("reference")])?;
        let diff = sterna().args(["diff", &at("reference"), &at("saved")]).output();
        let diff = diff.map_err(|error| error.to_string())?;
        if !diff.status.success() {
            return Err(String::from_utf8_lossy(&diff.stdout).into_owned());
        }
        Ok(())
    }
}

impl Survivor for Watched {
    fn memory(&self, blocks: &[(&str, u64)]) -> Result<Vec<Option<std::fs::File>>, VmError> {
        self.vm.memory(blocks)
    }
    fn check(&self, machine: &Shape, devices: &[HeldDevice]) -> Result<(), VmError> {
        self.vm.check(machine, devices)
    }
    fn prepare(&self, guest: &HeldGuest) -> Result<(), VmError> {
        self.image.prepare(guest)?;
        self.image.start()?;
        self.vm.prepare(guest)
    }
    fn start(&self) -> Result<(), VmError> {
        self.check().map_err(|why| VmError::new("the VM that waits", why))?;
        self.vm.start()
    }
    fn discard(&self) {
        self.vm.discard();
    }
}

#[test]
fn waiting_qemu_has_ram_and_devices_of_the_last_checkpoint_and_goes_on() -> Result<(), Failure> {
    let test = "waiting_qemu_has_ram_and_devices_of_the_last_checkpoint_and_goes_on";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    for machine in ["pc", "q35", "microvm"] {
        taken_over(&root, machine).map_err(|why| format!("{machine}: {why}"))?;
    }
    Ok(())
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Result<Option<T>, Failure>) -> Result<T, Failure> {
    let begin = std::time::Instant::now();
    while begin.elapsed() < sterna_interop::qemu::PATIENCE {
        if let Some(found) = look()? {
            return Ok(found);
        }
    }
    Err(format!("{what} did not come"))
}

fn taken_over(root: &Root, machine: &str) -> Result<(), Failure> {
    let builder = Qemu::builder(root).machine(machine).memory_mib(32).ram(Ram::File).guest(Guest::Boot);
    // The clock is saved with the guest, and does not follow the host's clock.
    let builder = builder.args(&["-rtc", "clock=vm"]);
    let mut primary = builder.clone().spawn()?;
    primary.wait_for_ticks(2)?;
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let place = directory.path();
    let command = command(&builder, place)?;
    std::fs::create_dir(place.join("vm")).map_err(|error| error.to_string())?;
    let vm = WaitingVm::new(&command, place, &place.join("vm"), false).map_err(|error| error.to_string())?;
    let plan = ImagePlan { path: place.join("image"), options: MappedOptions::default(), convert: None };
    let watched = std::sync::Arc::new(Watched {
        builder: builder.clone(),
        vm,
        image: ImageSurvivor::new(plan),
        directory: place.to_owned(),
        ram: parking_lot::Mutex::default(),
    });
    let at = Address::Unix(place.join("standby"));
    let standby = Standby::protect(
        &at,
        &StandbyOptions::default(),
        Parameters::default(),
        Capabilities::default(),
        std::sync::Arc::new(()),
        watched.clone(),
        None,
    )
    .map_err(|error| error.to_string())?;
    primary.capabilities(&["x-colo", "return-path"])?;
    primary.parameters(json!({"max-bandwidth": 0, "downtime-limit": 10_000, "x-checkpoint-delay": 50}))?;
    primary.start_migration(&standby.address().to_string())?;
    wait("checkpoints", || standby.statistics().checkpoints > 5)?;
    // Checkpoints continue while the VM waits.
    watched.vm.launch().map_err(|error| error.to_string())?;
    primary.wait_for_ticks(2)?;
    primary.parameters(json!({ "x-checkpoint-delay": 600_000 }))?;
    // The end of a checkpoint in progress resumes the guest. It is therefore stopped until no checkpoint is
    // in progress.
    let (ram, number) = wait_for("a guest that stands", || {
        primary.stop()?;
        let file = primary.directory().join("ram");
        let look = || std::fs::read(&file).map_err(|error| error.to_string());
        let (before, number) = (look()?, standby.statistics().checkpoints);
        std::thread::sleep(Duration::from_millis(300));
        let stands = primary.status()? == "paused" && standby.statistics().checkpoints == number;
        Ok((stands && look()? == before).then_some((before, number)))
    })?;
    *watched.ram.lock() = ram;
    primary.parameters(json!({ "x-checkpoint-delay": 600_001 }))?;
    wait("the last checkpoint", || standby.statistics().checkpoints > number)?;
    primary.kill();
    wait("the loss", || matches!(standby.state(), StandbyState::Lost(_)))?;

    let held = standby.takeover_by(&*watched, &OperatorsWord).map_err(|error| error.to_string())?;

    assert_eq!(held.number, number + 1);
    let survived = watched.vm.release().ok_or("it does not run")?;
    let _ours = Ours(survived.process);
    counts_on(place, &primary)
}

#[test]
fn guest_of_a_killed_qemu_goes_on_in_the_one_that_waits() -> Result<(), Failure> {
    let test = "guest_of_a_killed_qemu_goes_on_in_the_one_that_waits";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let place = directory.path();
    let builder = Qemu::builder(&root).memory_mib(32).ram(Ram::File).guest(Guest::Boot);
    let words = command(&builder, place)?.into_iter().map(|word| word.to_string_lossy().into_owned());
    let mut more = vec![format!("--ram-dir={}", place.display()), "--".to_owned()];
    more.extend(words);
    more.extend(["-incoming".to_owned(), "defer".to_owned()]);
    let mut protected = Protected::begin(&root, 0, &more)?;
    protected.command.wait_for("the VM", |said| said["waiting_vm"] == "waits")?;
    protected.primary.kill();
    protected.heart.freeze();

    let (last, status) = protected.command.end()?;

    assert!(status.success(), "{status}: {last}");
    let _ours = Ours(last["process"].as_u64().ok_or("no process")? as u32);
    assert!(last["image"].is_null() && !protected.directory.join("image").exists(), "{last}");
    assert_eq!(protected.fenced().len(), 1);
    counts_on(place, &protected.primary)?;
    // The operator can use the VM's monitor, and the settings for loading are restored.
    let monitor = Endpoint::Unix(PathBuf::from(last["monitor"].as_str().ok_or("no monitor")?));
    let mut monitor = Client::connect(&monitor, PATIENCE).map_err(|error| error.to_string())?;
    let list =
        monitor.execute("query-migrate-capabilities", Value::Null).map_err(|error| error.to_string())?;
    let on: Vec<_> = list.as_array().into_iter().flatten().filter(|entry| entry["state"] == true).collect();
    assert_eq!(on, Vec::<&Value>::new());
    let directory = PathBuf::from(last["messages"].as_str().ok_or("no log")?);
    let _ = std::fs::remove_dir_all(directory.ancestors().nth(2).ok_or("no directory")?);
    Ok(())
}

#[test]
fn disk_that_is_still_the_primarys_keeps_the_guest_paused() -> Result<(), Failure> {
    let test = "disk_that_is_still_the_primarys_keeps_the_guest_paused";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let place = directory.path();
    let disk = place.join("disk");
    std::fs::File::create(&disk).and_then(|file| file.set_len(1 << 20)).map_err(|error| error.to_string())?;
    let drive = format!("file={},format=raw,if=virtio", disk.display());
    let builder = Qemu::builder(&root).memory_mib(32).ram(Ram::File).guest(Guest::Boot);
    let builder = builder.args(&["-drive", &drive]);
    let words = command(&builder, place)?.into_iter().map(|word| word.to_string_lossy().into_owned());
    let mut more = vec![format!("--ram-dir={}", place.display()), "--".to_owned()];
    more.extend(words);
    let mut protected = Protected::begin_as(builder, 0, None, &more)?;
    let pid = Pid::from_raw(protected.primary.pid() as i32).ok_or("no process")?;
    protected.heart.freeze();
    kill_process(pid, Signal::STOP).map_err(|error| error.to_string())?;
    // The fence reported success without an effect, so the primary still has the disk's lock.
    let said = protected.command.wait_for("the failure", |said| said["state"] == "not started")?;
    assert!(said["trouble"].as_str().is_some_and(|why| why.contains("lock")), "{said}");

    kill_process(pid, Signal::KILL).map_err(|error| error.to_string())?;
    protected.primary.kill();
    protected.takeover(&[])?;

    let (last, status) = protected.command.end()?;
    assert!(status.success(), "{status}: {last}");
    let _ours = Ours(last["process"].as_u64().ok_or("no process")? as u32);
    counts_on(place, &protected.primary)?;
    let directory = PathBuf::from(last["messages"].as_str().ok_or("no log")?);
    let _ = std::fs::remove_dir_all(directory.ancestors().nth(2).ok_or("no directory")?);
    Ok(())
}

#[test]
fn vm_that_cannot_take_the_guest_leaves_it_held_and_an_image_is_made() -> Result<(), Failure> {
    let test = "vm_that_cannot_take_the_guest_leaves_it_held_and_an_image_is_made";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let place = directory.path();
    // The VM's machine differs from the primary's.
    let builder = Qemu::builder(&root).machine("q35").memory_mib(32).ram(Ram::File).guest(Guest::Boot);
    let words = command(&builder, place)?.into_iter().map(|word| word.to_string_lossy().into_owned());
    let mut more = vec![format!("--ram-dir={}", place.display()), "--".to_owned()];
    more.extend(words);
    let mut protected = Protected::begin(&root, 0, &more)?;
    protected.primary.kill();
    protected.heart.freeze();
    let said = protected.command.wait_for("the failure", |said| said["state"] == "unready")?;
    assert!(said["trouble"].as_str().is_some_and(|why| why.contains("q35")), "{said}");
    assert!(protected.fenced().is_empty(), "nothing was claimed");

    protected.takeover(&["--image"])?;

    let (last, status) = protected.command.end()?;
    assert!(status.success() && last["image"].is_string(), "{status}: {last}");
    protected.goes_on_from_image()
}
