//! A QEMU 11 with `x-colo` as the primary of a standby that runs no guest. The standby holds its checkpoints.
//! After the primary was killed, the last checkpoint continues in another QEMU.

mod golden;
mod thousand;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use sterna::{Address, Capabilities, Compression, Parameters};
use sterna_image::{Image, MappedOptions};
use sterna_interop::qemu::PATIENCE;
use sterna_interop::{Builder, Failure, Guest, Qemu, Ram, Root, sterna, sterna_does, unbroken};
use sterna_opaque::ImagePlan;
use sterna_standby::{OperatorsWord, Standby, StandbyOptions, StandbyState, TakenOver};

const RAM_BYTES: usize = 32 << 20;

/// The settings with which checkpoints are sent.
#[derive(Debug, Clone, Copy)]
struct Way {
    machine: &'static str,
    unix: bool,
    /// Number of multifd channels; 0: only the main channel.
    channels: u8,
    compression: Compression,
    zero_pages: &'static str,
    xbzrle: bool,
}

const PLAIN: Way = Way {
    machine: "pc",
    unix: true,
    channels: 0,
    compression: Compression::None,
    zero_pages: "multifd",
    xbzrle: false,
};

impl Way {
    fn engine(self) -> (Parameters, Capabilities) {
        let parameters = Parameters {
            multifd_channels: self.channels.max(1),
            multifd_compression: self.compression,
            ..Parameters::default()
        };
        (parameters, Capabilities { multifd: self.channels > 0, ..Capabilities::default() })
    }

    fn builder(self, root: &Root) -> Builder {
        Qemu::builder(root)
            .machine(self.machine)
            .memory_mib((RAM_BYTES >> 20) as u64)
            .ram(Ram::File)
            .guest(Guest::Boot)
    }

    /// Configures the primary.
    fn set(self, primary: &mut Qemu) -> Result<(), Failure> {
        let mut on = vec!["x-colo", "return-path"];
        if self.channels > 0 {
            on.push("multifd");
        }
        if self.xbzrle {
            on.push("xbzrle");
        }
        primary.capabilities(&on)?;
        let compression = match self.compression {
            Compression::Zlib => "zlib",
            Compression::Zstd => "zstd",
            _ => "none",
        };
        primary.parameters(json!({
            "max-bandwidth": 0, "downtime-limit": 10_000, "x-checkpoint-delay": 50,
            "multifd-channels": self.channels.max(1), "multifd-compression": compression,
            "zero-page-detection": self.zero_pages,
        }))
    }
}

fn wait<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> Result<T, Failure> {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        if let Some(found) = look() {
            return Ok(found);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(format!("{what} did not come"))
}

/// Waits until checkpoint `number` of the primary is held.
fn wait_for_checkpoint(primary: &mut Qemu, standby: &Standby, number: u64) -> Result<(), Failure> {
    let held = wait(&format!("checkpoint {number}"), || match standby.state() {
        StandbyState::Lost(why) | StandbyState::Failed(why) => Some(Err(why.to_string())),
        _ if standby.statistics().checkpoints >= number => Some(Ok(())),
        _ => primary.unfailed_migration().err().map(Err),
    })?;
    held.map_err(|why| format!("checkpoint {number}: {why}"))
}

fn plan(path: &Path) -> ImagePlan {
    ImagePlan { path: path.to_owned(), options: MappedOptions::default(), convert: None }
}

/// Starts the image's guest, which runs immediately, and checks that its count continues.
fn goes_on(builder: &Builder, primary: &Qemu, image: &Path) -> Result<(), Failure> {
    sterna_does(&["verify".as_ref(), image.as_os_str()])?;
    let mut survivor = builder.clone().incoming_defer().spawn()?;
    survivor.capabilities(&["mapped-ram"])?;
    survivor.incoming(&format!("file:{}", image.display()))?;
    survivor.wait_for_status("running")?;
    survivor.wait_for_ticks(3)?;
    unbroken(&[&survivor])?;
    let (first, last) = (survivor.ticks()[0].number, primary.ticks().last().map_or(0, |tick| tick.number));
    if first <= 2 || first > last + 1 {
        return Err(format!("the survivor goes on with tick {first}, the primary had come to {last}"));
    }
    Ok(())
}

/// Follows 30 checkpoints of a running guest. Then takes over a checkpoint whose RAM is known.
fn followed(root: &Root, way: Way) -> Result<TakenOver, Failure> {
    let builder = way.builder(root);
    let mut primary = builder.clone().spawn()?;
    primary.wait_for_ticks(2)?;
    let (parameters, capabilities) = way.engine();
    let socket = primary.directory().join("standby");
    let at =
        if way.unix { Address::Unix(socket) } else { Address::Tcp { host: "127.0.0.1".into(), port: 0 } };
    let options = StandbyOptions { insecure: true, ..StandbyOptions::default() };
    let standby = Standby::listen(&at, &options, parameters, capabilities, Arc::new(()))
        .map_err(|error| error.to_string())?;
    way.set(&mut primary)?;
    primary.start_migration(&standby.address().to_string())?;
    wait_for_checkpoint(&mut primary, &standby, 30)?;
    primary.wait_for_ticks(2)?;

    // From here on, QEMU takes a checkpoint only on request. It resumes a stopped guest after a checkpoint.
    primary.parameters(json!({ "x-checkpoint-delay": 600_000 }))?;
    let number = stopped_between_checkpoints(&mut primary, &standby)?;
    let ram = std::fs::read(primary.directory().join("ram")).map_err(|error| error.to_string())?;
    primary.parameters(json!({ "x-checkpoint-delay": 600_001 }))?;
    wait_for_checkpoint(&mut primary, &standby, number + 1)?;
    primary.wait_for_ticks(1)?;
    primary.kill();
    wait("the loss of the primary", || matches!(standby.state(), StandbyState::Lost(_)).then_some(()))?;

    let image = primary.directory().join("image");
    let taken = standby.takeover(&plan(&image), &OperatorsWord).map_err(|error| error.to_string())?;

    if taken.checkpoint.number != number + 1 {
        return Err(format!("{} was taken over, {} was held", taken.checkpoint.number, number + 1));
    }
    assert_ram(&image, &ram)?;
    goes_on(&builder, &primary, &image)?;
    Ok(taken)
}

/// Stops the guest when no checkpoint is in progress, and returns the number of the last one.
///
/// One may be in progress, and the new delay has requested another. A checkpoint resumes a stopped guest at its end, so a
/// guest that stays stopped has none.
fn stopped_between_checkpoints(primary: &mut Qemu, standby: &Standby) -> Result<u64, Failure> {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        primary.stop()?;
        let number = standby.statistics().checkpoints;
        std::thread::sleep(Duration::from_secs(1));
        if primary.status()? == "paused" && standby.statistics().checkpoints == number {
            return Ok(number);
        }
    }
    Err("checkpoints that nothing requests came".to_owned())
}

/// Checks that the image's RAM equals `ram`.
fn assert_ram(image: &Path, ram: &[u8]) -> Result<(), Failure> {
    let image = Image::open(image).map_err(|error| error.to_string())?;
    let block = image.shape().ram.blocks.iter().position(|block| block.name == "ram0").ok_or("no ram0")?;
    let mut ours = vec![0; RAM_BYTES];
    image.mapped().ok_or("no mapped-ram")?.read(block, 0, &mut ours).map_err(|error| error.to_string())?;
    let differs = ours.chunks(4096).zip(ram.chunks(4096)).filter(|(ours, theirs)| ours != theirs).count();
    if differs > 0 || ram.len() != RAM_BYTES {
        return Err(format!("{differs} pages of {} bytes differ from the primary's", ram.len()));
    }
    Ok(())
}

#[test]
fn last_checkpoint_of_a_killed_qemu_is_its_ram_and_goes_on() -> Result<(), Failure> {
    let test = "last_checkpoint_of_a_killed_qemu_is_its_ram_and_goes_on";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let ways = [
        PLAIN,
        Way { unix: false, zero_pages: "none", ..PLAIN },
        Way { xbzrle: true, ..PLAIN },
        Way { channels: 1, zero_pages: "none", ..PLAIN },
        Way { channels: 2, ..PLAIN },
        Way { channels: 2, unix: false, compression: Compression::Zlib, ..PLAIN },
        Way { channels: 2, compression: Compression::Zstd, machine: "q35", ..PLAIN },
        Way { channels: 16, zero_pages: "legacy", machine: "microvm", ..PLAIN },
    ];
    for way in ways {
        followed(&root, way).map_err(|why| format!("{way:?}: {why}"))?;
    }
    Ok(())
}

/// The command's process, and its output.
struct Command {
    process: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Command {
    fn start(arguments: &[&str]) -> Result<Self, Failure> {
        let mut process = sterna()
            .arg("standby")
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(|error| error.to_string())?;
        let lines = process.stdout.take().map(BufReader::new).ok_or("no output")?;
        Ok(Self { process, lines })
    }

    /// The next value in the command's output.
    fn next(&mut self) -> Result<serde_json::Value, Failure> {
        let mut line = String::new();
        self.lines.read_line(&mut line).map_err(|error| error.to_string())?;
        serde_json::from_str(&line).map_err(|error| format!("{error}: {line:?}"))
    }
}

impl Drop for Command {
    fn drop(&mut self) {
        // An error means that the process has ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn standby_command_takes_over_when_qemu_is_killed() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("standby_command_takes_over_when_qemu_is_killed") else { return Ok(()) };
    for (channels, unix) in [(0, true), (2, false)] {
        let way = Way { channels, unix, ..PLAIN };
        let builder = way.builder(&root);
        let mut primary = builder.clone().spawn()?;
        primary.wait_for_ticks(2)?;
        let (socket, image) = (primary.directory().join("standby"), primary.directory().join("image"));
        let at =
            if unix { format!("listen:unix:{}", socket.display()) } else { "listen:tcp:127.0.0.1:0".into() };
        let (place, count) = (image.display().to_string(), format!("--channels={channels}"));
        let mut arguments =
            vec![at.as_str(), "--image", &place, "--on-loss", "image", "--insecure", "--json"];
        arguments.extend((channels > 0).then_some(count.as_str()));
        let mut command = Command::start(&arguments)?;
        // The file of a Unix socket exists shortly before the server listens, so its existence is not
        // sufficient.
        let first = command.next()?;
        let to = first["address"].as_str().ok_or_else(|| format!("no address in {first}"))?;
        way.set(&mut primary)?;
        primary.start_migration(to)?;
        let begin = Instant::now();
        loop {
            let said = command.next()?;
            if said["checkpoints"].as_u64() >= Some(30) {
                break;
            }
            let state = primary.unfailed_migration()?;
            assert!(begin.elapsed() < PATIENCE, "{said}, {state}");
        }
        primary.wait_for_ticks(2)?;
        primary.kill();

        let end = loop {
            let said = command.next()?;
            if said["schema"] == "sterna-standby" && said["image"].is_string() {
                break said;
            }
        };

        assert!(end["checkpoint"].as_u64() >= Some(30), "{end}");
        let status = command.process.wait().map_err(|error| error.to_string())?;
        assert!(status.success(), "{status}");
        goes_on(&builder, &primary, &image)?;
    }
    Ok(())
}

#[test]
fn qemu_without_x_colo_leaves_its_guest_with_the_standby() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("qemu_without_x_colo_leaves_its_guest_with_the_standby") else {
        return Ok(());
    };
    let builder = PLAIN.builder(&root);
    let mut primary = builder.clone().spawn()?;
    primary.wait_for_ticks(3)?;
    let at = Address::Unix(primary.directory().join("standby"));
    let (parameters, capabilities) = PLAIN.engine();
    let standby = Standby::listen(&at, &StandbyOptions::default(), parameters, capabilities, Arc::new(()))
        .map_err(|error| error.to_string())?;
    primary.capabilities(&["return-path"])?;
    primary.migrate(&standby.address().to_string())?;
    let why = wait("the loss of the primary", || match standby.state() {
        StandbyState::Lost(why) => Some(why.to_string()),
        _ => None,
    })?;
    assert!(why.contains("this standby has the only copy"), "{why}");

    let image = primary.directory().join("image");
    standby.takeover(&plan(&image), &OperatorsWord).map_err(|error| error.to_string())?;

    goes_on(&builder, &primary, &image)
}
