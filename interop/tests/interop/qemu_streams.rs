//! QEMU's streams into Sterna's images and out of them: every channel, codec, zero page detection and
//! machine.
//!
//! A paused QEMU with its RAM in a file migrates to [`sterna_opaque::receive`]. The image's RAM must equal
//! the file. The RAM of a second QEMU that receives the image must equal it as well. Running guests must
//! continue to count.

use std::path::Path;
use std::sync::Arc;

use sterna::{Address, Capabilities, Compression, Outcome, Parameters};
use sterna_image::tools::diff::{DiffOptions, diff};
use sterna_image::tools::state::State;
use sterna_image::{Image, MappedOptions};
use sterna_interop::qemu::PATIENCE;
use sterna_interop::{Failure, Guest, Qemu, Ram, Root, fill, skip, unbroken};
use sterna_opaque::{ImagePlan, Receiving, SendOptions, Stored, receive, send};

/// The settings with which a machine is sent.
#[derive(Clone, Copy, Debug)]
struct Way {
    machine: &'static str,
    unix: bool,
    /// Number of multifd channels; 0: only the main channel.
    channels: u8,
    compression: Compression,
    zero_pages: &'static str,
    return_path: bool,
    switchover_ack: bool,
}

const PLAIN: Way = Way {
    machine: "pc",
    unix: false,
    channels: 0,
    compression: Compression::None,
    zero_pages: "multifd",
    return_path: true,
    switchover_ack: false,
};

impl Way {
    fn capabilities(self) -> Capabilities {
        Capabilities {
            multifd: self.channels > 0,
            return_path: self.return_path,
            switchover_ack: self.switchover_ack,
            ..Capabilities::default()
        }
    }

    fn parameters(self) -> Parameters {
        Parameters {
            max_bandwidth_bytes: 0,
            multifd_channels: self.channels.max(1),
            multifd_compression: self.compression,
            zero_page_detection: match self.zero_pages {
                "none" => sterna::ZeroPageDetection::None,
                "legacy" => sterna::ZeroPageDetection::Legacy,
                _ => sterna::ZeroPageDetection::Multifd,
            },
            ..Parameters::default()
        }
    }

    /// Configures a QEMU.
    fn set(self, qemu: &mut Qemu) -> Result<(), Failure> {
        let mut on = Vec::new();
        if self.channels > 0 {
            on.push("multifd");
        }
        if self.return_path {
            on.push("return-path");
        }
        if self.switchover_ack {
            on.push("switchover-ack");
        }
        qemu.capabilities(&on)?;
        let compression = match self.compression {
            Compression::None => "none",
            Compression::Zlib => "zlib",
            Compression::Zstd => "zstd",
            other => panic!("QEMU has no {other:?}"),
        };
        qemu.parameters(serde_json::json!({
            "multifd-channels": self.channels.max(1),
            "multifd-compression": compression,
            "zero-page-detection": self.zero_pages,
        }))
    }
}

fn listen(way: Way, place: &Path) -> Result<Receiving, Failure> {
    let at = if way.unix {
        format!("unix:{}", place.with_extension("sock").display())
    } else {
        "tcp:127.0.0.1:0".into()
    };
    let at: Address = at.parse().map_err(|error| format!("{at}: {error:?}"))?;
    let plan = ImagePlan { path: place.to_owned(), options: MappedOptions::default(), convert: None };
    receive(&at, plan, way.parameters(), way.capabilities(), Arc::new(())).map_err(|error| error.to_string())
}

/// The address in QEMU's syntax.
fn uri(address: &Address) -> String {
    address.to_string()
}

fn save(way: Way, source: &mut Qemu, place: &Path) -> Result<Stored, Failure> {
    let receiving = listen(way, place)?;
    way.set(source)?;
    let told = source.migrate(&uri(&receiving.address()));
    let stored = receiving.wait().map_err(|error| format!("{way:?}: {error}; the source: {told:?}"))?;
    told.map(|_| stored)
}

fn restore(way: Way, place: &Path, target: &mut Qemu) -> Result<(), Failure> {
    way.set(target)?;
    let to = if way.unix {
        target.listen_on_unix()?
    } else {
        format!("tcp:127.0.0.1:{}", target.listen_on_tcp()?)
    };
    let to: Address = to.parse().map_err(|error| format!("{to}: {error:?}"))?;
    let image = Image::open(place).map_err(|error| error.to_string())?;
    let migration =
        send(image, &to, &SendOptions::default(), way.parameters(), way.capabilities(), Arc::new(()))
            .map_err(|error| error.to_string())?;
    match migration.wait() {
        Outcome::Completed => target.wait_for_migration().map(drop),
        other => Err(format!("{other:?}; the target: {}", target.log())),
    }
}

fn ram_of(image: &Path, name: &str) -> Result<Vec<u8>, Failure> {
    let image = Image::open(image).map_err(|error| error.to_string())?;
    let mapped = image.mapped().ok_or("no fixed places")?;
    let found = mapped.blocks().iter().enumerate().find(|(_, block)| block.name == name);
    let (index, block) = found.ok_or("no such block")?;
    let mut bytes = vec![0; block.length_bytes as usize];
    mapped.read(index, 0, &mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// Moves a paused machine into an image. Then moves it into a second machine, and into a second image.
fn round_trip(root: &Root, way: Way) -> Result<(), Failure> {
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let builder = Qemu::builder(root).machine(way.machine).memory_mib(32).ram(Ram::File).arg("-S");
    let mut source = builder.clone().spawn()?;
    let mut target = builder.incoming_defer().spawn()?;
    fill(&source.directory().join("ram"), 0x5eed_0000 + u64::from(way.channels))?;
    let wanted = std::fs::read(source.directory().join("ram")).map_err(|e| e.to_string())?;
    let place = directory.path().join("first");

    let second = directory.path().join("second");
    save(way, &mut source, &place)?;
    if ram_of(&place, "ram0")? != wanted {
        return Err(format!("{way:?}: RAM in the image is not the source's"));
    }
    restore(way, &place, &mut target)?;
    if std::fs::read(target.directory().join("ram")).map_err(|e| e.to_string())? != wanted {
        return Err(format!("{way:?}: RAM of the target is not the source's"));
    }
    save(way, &mut target, &second)?;
    if ram_of(&second, "ram0")? != wanted {
        return Err(format!("{way:?}: RAM has changed on the way"));
    }
    same_machine(&place, &second).map_err(|why| format!("{way:?}: {why}"))
}

/// Bytes that change although the guest is paused: section, offsets in its body, reason. mc146818rtc, the
/// clock of `pc` and `q35`, follows the host's clock here, which never stops. Its body starts with the chip's
/// registers.
const MOVING: [(&str, &[usize], &str); 5] = [
    (
        "mc146818rtc",
        &[0, 2, 4, 6, 7, 8, 9],
        "the time and the date; the alarm's bytes between them stand still",
    ),
    ("mc146818rtc", &[10], "register A: bit 7 says that the time is about to change"),
    ("mc146818rtc", &[12], "register C: bit 4 says that the time has changed"),
    ("mc146818rtc", &[229, 230, 231, 232, 233, 234, 235, 236], "update_timer: when the time changes next"),
    ("mc146818rtc", &[237, 238, 239, 240, 241, 242, 243, 244], "next_alarm_time, reckoned from the time"),
];

/// Checks that devices are equal in both images, except for [`MOVING`]. QEMU loaded them from the first image
/// and wrote them into the second. Configuration, description and all blocks, including video memory and
/// firmware, must also be equal.
fn same_machine(first: &Path, second: &Path) -> Result<(), Failure> {
    let open = |path: &Path| Image::open(path).map_err(|error| error.to_string());
    let (first, second, directory) = (open(first)?, open(second)?, first.with_file_name(""));
    let mut found =
        diff(&first, &second, &directory, &DiffOptions::default()).map_err(|error| error.to_string())?;
    let (a, b) = (State::of(&first), State::of(&second));
    let mut changed = Vec::new();
    found.sections.retain(|section| {
        let (name, instance) = (section.name.as_str(), section.instance);
        let (Some(a), Some(b)) = (a.find(name, instance), b.find(name, instance)) else { return true };
        let bytes = a.body.iter().zip(b.body).enumerate();
        let still: Vec<_> =
            bytes.filter(|(at, (a, b))| a != b && !moves(name, *at)).map(|(at, _)| at).collect();
        let is_changed =
            a.body.len() != b.body.len() || section.versions[0] != section.versions[1] || !still.is_empty();
        changed.extend((!still.is_empty()).then(|| format!("{name}: {still:?}")));
        is_changed
    });
    if found.is_same() { Ok(()) } else { Err(format!("changed on the way: {changed:?}, {found:#?}")) }
}

fn moves(section: &str, at: usize) -> bool {
    MOVING.iter().any(|(name, bytes, _)| *name == section && bytes.contains(&at))
}

fn trips(test: &str, ways: &[Way]) -> Result<(), Failure> {
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    ways.iter().try_for_each(|way| round_trip(&root, *way))
}

#[test]
fn main_channel_carries_machines_of_every_type_and_back() -> Result<(), Failure> {
    let ways: Vec<_> = ["pc", "q35", "microvm"]
        .into_iter()
        .flat_map(|machine| [false, true].map(|unix| Way { machine, unix, ..PLAIN }))
        .collect();
    trips("main_channel_carries_machines_of_every_type_and_back", &ways)
}

#[test]
fn multifd_carries_machines_with_any_number_of_channels_and_back() -> Result<(), Failure> {
    let ways: Vec<_> = [1, 2, 4, 16]
        .into_iter()
        .map(|channels| Way { channels, unix: channels % 4 == 0, ..PLAIN })
        .collect();
    trips("multifd_carries_machines_with_any_number_of_channels_and_back", &ways)
}

#[test]
fn compressed_multifd_carries_machines_and_back() -> Result<(), Failure> {
    let ways: Vec<_> = [Compression::Zlib, Compression::Zstd]
        .into_iter()
        .flat_map(|compression| [1, 4].map(|channels| Way { channels, compression, ..PLAIN }))
        .collect();
    trips("compressed_multifd_carries_machines_and_back", &ways)
}

#[test]
fn zero_pages_of_every_form_are_carried_and_back() -> Result<(), Failure> {
    let ways: Vec<_> = ["none", "legacy", "multifd"]
        .into_iter()
        .flat_map(|zero_pages| [0, 2].map(|channels| Way { channels, zero_pages, ..PLAIN }))
        .collect();
    trips("zero_pages_of_every_form_are_carried_and_back", &ways)
}

#[test]
fn without_return_path_machines_are_carried_and_back() -> Result<(), Failure> {
    let ways = [0, 2].map(|channels| Way { channels, return_path: false, ..PLAIN });
    trips("without_return_path_machines_are_carried_and_back", &ways)
}

/// No device here requests an acknowledgement. With `pc` (11.1) no acknowledgement is due, and one would be
/// fatal to the source. With 9.2 one is due, and without it the source waits without end (specs/stream.md
/// §5.3). QEMU is source and destination.
#[test]
fn switchover_is_acknowledged_in_both_forms_and_both_directions() -> Result<(), Failure> {
    let ways: Vec<_> = ["pc", "pc-i440fx-9.2"]
        .into_iter()
        .flat_map(|machine| [0, 2].map(|channels| Way { machine, channels, switchover_ack: true, ..PLAIN }))
        .collect();
    trips("switchover_is_acknowledged_in_both_forms_and_both_directions", &ways)
}

#[test]
fn machine_without_ram_goes_into_an_image_and_back() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("machine_without_ram_goes_into_an_image_and_back") else { return Ok(()) };
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let place = directory.path().join("image");
    let builder = Qemu::builder(&root).machine("none").arg("-S");
    let mut source = builder.clone().spawn()?;
    let mut target = builder.incoming_defer().spawn()?;
    let stored = save(PLAIN, &mut source, &place)?;
    assert_eq!(stored.shape.configuration.machine_type, "none");
    restore(PLAIN, &place, &mut target)
}

#[test]
fn running_guest_goes_on_behind_its_image() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("running_guest_goes_on_behind_its_image") else { return Ok(()) };
    for way in [
        PLAIN,
        Way { channels: 2, machine: "q35", unix: true, ..PLAIN },
        Way { machine: "microvm", channels: 4, compression: Compression::Zstd, ..PLAIN },
    ] {
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        let place = directory.path().join("image");
        let builder = Qemu::builder(&root).machine(way.machine).kvm_if_any().guest(Guest::Boot);
        let mut source = builder.clone().spawn()?;
        let mut target = builder.incoming_defer().spawn()?;
        source.wait_for_ticks(2).map_err(|error| format!("{way:?}: at the source: {error}"))?;
        save(way, &mut source, &place)?;
        restore(way, &place, &mut target)?;
        let went_on = target.wait_for_ticks(2).and_then(|_| unbroken(&[&source, &target]));
        went_on.map_err(|error| {
            let last = source.ticks().last().copied();
            format!("{way:?}: at the target, behind the source's {last:?}: {error}")
        })?;
    }
    Ok(())
}

#[test]
fn machine_that_describes_nothing_goes_into_an_image_and_back() -> Result<(), Failure> {
    let ways =
        [true, false].map(|return_path| Way { machine: "pc,suppress-vmdesc=on", return_path, ..PLAIN });
    trips("machine_that_describes_nothing_goes_into_an_image_and_back", &ways)
}

#[test]
fn virtio_mem_with_its_early_section_goes_into_an_image_and_back() -> Result<(), Failure> {
    let test = "virtio_mem_with_its_early_section_goes_into_an_image_and_back";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let builder = Qemu::builder(&root).machine("q35").memory_mib(32).args(&[
        "-S",
        "-m",
        "maxmem=1G",
        "-object",
        "memory-backend-ram,id=vm0,size=64M",
        "-device",
        "virtio-mem-pci,id=vmem0,memdev=vm0,requested-size=32M",
    ]);
    for way in [PLAIN, Way { channels: 2, ..PLAIN }] {
        let place = directory.path().join(format!("image{}", way.channels));
        let mut source = builder.clone().spawn()?;
        let mut target = builder.clone().incoming_defer().spawn()?;
        let stored = save(way, &mut source, &place)?;
        let early = String::from_utf8_lossy(&stored.shape.early).into_owned();
        if !early.contains("virtio-mem-device-early") {
            return Err(format!("no early section in {early:?}"));
        }
        restore(way, &place, &mut target)?;
        let again = save(way, &mut target, &place.with_extension("again"))?;
        if again.shape.early != stored.shape.early {
            return Err("the early section has changed on the way".to_owned());
        }
    }
    Ok(())
}

#[test]
fn background_snapshot_without_end_goes_into_an_image_and_back() -> Result<(), Failure> {
    let test = "background_snapshot_without_end_goes_into_an_image_and_back";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let place = directory.path().join("image");
    let builder = Qemu::builder(&root).guest(Guest::Boot);
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(1)?;
    if let Err(why) = source.capabilities(&["background-snapshot"]) {
        skip(test, &why);
        return Ok(());
    }
    let way = Way { return_path: false, ..PLAIN };
    let receiving = listen(way, &place)?;
    source.migrate(&uri(&receiving.address()))?;
    let stored = receiving.wait().map_err(|error| error.to_string())?;
    assert!(!stored.shape.has_end && stored.shape.between.is_empty());
    // The guest continues at the source. A second copy continues from the image.
    source.wait_for_ticks(1)?;
    let mut target = builder.incoming_defer().spawn()?;
    restore(PLAIN, &place, &mut target)?;
    target.resume()?;
    target.wait_for_ticks(2).map(drop)
}

#[test]
fn xbzrle_of_a_writing_guest_is_applied() -> Result<(), Failure> {
    let test = "xbzrle_of_a_writing_guest_is_applied";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let place = directory.path().join("image");
    let builder = Qemu::builder(&root).guest(Guest::Boot);
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(1)?;
    source.capabilities(&["return-path", "xbzrle"])?;
    source.parameters(serde_json::json!({
        "max-bandwidth": 40_000_000, "downtime-limit": 1, "xbzrle-cache-size": 64 << 20
    }))?;
    let receiving = listen(PLAIN, &place)?;
    source.start_migration(&uri(&receiving.address()))?;
    // Deltas are sent only after a few rounds over pages that the guest has written.
    let begin = std::time::Instant::now();
    loop {
        let state = source.execute("query-migrate", serde_json::Value::Null)?;
        if state["xbzrle-cache"]["pages"].as_u64().unwrap_or_default() > 100 {
            break;
        }
        if begin.elapsed() > PATIENCE {
            return Err(format!("no deltas: {state}"));
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    source.parameters(serde_json::json!({ "max-bandwidth": 0, "downtime-limit": 5000 }))?;
    source.wait_for_migration()?;
    receiving.wait().map_err(|error| error.to_string())?;
    let mut target = builder.incoming_defer().spawn()?;
    restore(PLAIN, &place, &mut target)?;
    target.wait_for_ticks(2)?;
    unbroken(&[&source, &target]).map(drop)
}

#[test]
fn qemu_killed_half_way_leaves_no_image() -> Result<(), Failure> {
    let test = "qemu_killed_half_way_leaves_no_image";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    for way in [PLAIN, Way { channels: 2, ..PLAIN }] {
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        let place = directory.path().join("image");
        let mut source = Qemu::builder(&root).memory_mib(32).ram(Ram::File).arg("-S").spawn()?;
        fill(&source.directory().join("ram"), 77)?;
        way.set(&mut source)?;
        source.parameters(serde_json::json!({ "max-bandwidth": 2_000_000 }))?;
        let receiving = listen(way, &place)?;
        source.start_migration(&uri(&receiving.address()))?;
        while receiving.statistics().normal_pages == 0 {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        source.kill();
        let error = receiving.wait().err().ok_or("an image of half a machine")?;
        assert_ne!(error.fault(), Some(sterna::Fault::Local), "{error}");
        drop(receiving);
        let left = std::fs::read_dir(directory.path()).map_err(|error| error.to_string())?.count();
        assert_eq!(left, 0);
    }
    Ok(())
}

#[test]
fn channel_counts_that_differ_fail_both_sides_and_the_guest_runs_on() -> Result<(), Failure> {
    let test = "channel_counts_that_differ_fail_both_sides_and_the_guest_runs_on";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    for (theirs, ours) in [(4, 2), (2, 4), (2, 0)] {
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        let mut source = Qemu::builder(&root).guest(Guest::Boot).spawn()?;
        source.wait_for_ticks(1)?;
        Way { channels: theirs, ..PLAIN }.set(&mut source)?;
        let here = Way { channels: ours, ..PLAIN };
        let mut parameters = here.parameters();
        parameters.limits.setup = std::time::Duration::from_secs(3);
        let at: Address = "tcp:127.0.0.1:0".parse().map_err(|error| format!("{error:?}"))?;
        let place = directory.path().join("image");
        let plan = ImagePlan { path: place, options: MappedOptions::default(), convert: None };
        let warnings = Arc::new(std::sync::Mutex::new(String::new()));
        let heard = Arc::clone(&warnings);
        let observer = move |event: &sterna::Event| {
            if let sterna::Event::Warning(text) = event {
                heard.lock().unwrap().push_str(text);
            }
        };
        let receiving = receive(&at, plan, parameters, here.capabilities(), Arc::new(observer))
            .map_err(|error| error.to_string())?;
        let told = source.migrate(&uri(&receiving.address()));
        assert!(told.is_err(), "{theirs} channels there, {ours} here: {told:?}");
        // A destination without a complete migration reports the reason, and waits for another one.
        for _ in 0..1000 {
            if warnings.lock().unwrap().contains("multifd") {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let _ = receiving.cancel();
        let error = receiving.wait().err().ok_or("an image")?.to_string();
        let said = format!("{}; {error}", warnings.lock().unwrap());
        assert!(said.contains("multifd"), "{said}");
        source.wait_for_status("running")?;
        source.wait_for_ticks(1)?;
        drop(receiving);
        assert_eq!(std::fs::read_dir(directory.path()).map_err(|error| error.to_string())?.count(), 0);
    }
    Ok(())
}
