//! A real virtiofsd and qemu-storage-daemon behind the machine's virtio transport. They are found by the
//! registers, driven from inside the guest, and moved by the engine into a second process.

mod same_host;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::registers::{DEVICE_ID, Registers, VERSION_1, guest};
use crate::virtqueue::{PATIENCE, Part, Virtqueue};
use sterna::{Address, Arrival, Capabilities, Incoming, Migration, Outcome, Parameters, SourceVm};
use sterna_interop::{Failure, Root, kvm_for};
use sterna_ram::dirty::DirtyBitmaps;
use sterna_vmm::{DeviceKind, KvmMachine, MachineConfig, VhostUserOptions};
use tempfile::TempDir;

use super::vhost_user::fuse;

const RINGS: u64 = 0x300_0000;
const RING_STEP: u64 = 0x1_0000;
const REQUEST: u64 = 0x310_0000;
const ANSWER: u64 = 0x320_0000;
const SECTOR: usize = 512;
const SECTORS: u64 = 4096;

/// A process that listens, killed when dropped.
struct BackEnd {
    child: Child,
    directory: TempDir,
}

impl BackEnd {
    /// Starts the command. `place` adds the socket's path to its arguments.
    fn start(mut command: Command, place: impl FnOnce(&mut Command, &Path)) -> Result<Self, Failure> {
        let directory = TempDir::new().map_err(|error| error.to_string())?;
        let log = fs::File::create(directory.path().join("log")).map_err(|error| error.to_string())?;
        let socket = directory.path().join("socket");
        place(&mut command, &socket);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().map_err(|error| format!("{command:?}: {error}"))?;
        // From here on, dropping the value kills the process in any case.
        let mut started = Self { child, directory };
        let begin = Instant::now();
        while !sterna_interop::is_listening(&socket) {
            let ended = started.child.try_wait().map_err(|error| error.to_string())?;
            if ended.is_some() || begin.elapsed() > PATIENCE {
                let said = fs::read_to_string(started.directory.path().join("log")).unwrap_or_default();
                return Err(format!("{command:?} does not listen: {said}"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(started)
    }

    fn virtiofsd(root: &Root, shared: &Path, options: &[&str]) -> Result<Self, Failure> {
        let mut command = root.command("virtiofsd");
        command.arg("--shared-dir").arg(shared);
        command.args(["--sandbox", "none", "--seccomp", "none", "--inode-file-handles=never"]);
        command.args(["--migration-mode", "find-paths", "--rlimit-nofile", "0"]).args(options);
        Self::start(command, |command, socket| {
            command.arg("--socket-path").arg(socket);
        })
    }

    /// Starts a storage daemon with `queues` queues. `rate` limits the requests per second; 0: no limit.
    fn storage_daemon(root: &Root, image: &Path, queues: usize, rate: u32) -> Result<Self, Failure> {
        let mut command = root.command("qemu-storage-daemon");
        let file = format!("driver=file,node-name=f,filename={}", image.display());
        command.arg("--object").arg(format!("throttle-group,id=t,x-iops-total={rate}"));
        command.arg("--blockdev").arg(file);
        command.args(["--blockdev", "driver=throttle,node-name=d,throttle-group=t,file=f"]);
        Self::start(command, |command, socket| {
            let export = format!("type=vhost-user-blk,id=e,node-name=d,writable=on,num-queues={queues}");
            let monitor = socket.with_file_name("monitor");
            command
                .arg("--chardev")
                .arg(format!("socket,id=m,path={},server=on,wait=off", monitor.display()));
            command.args(["--monitor", "chardev=m"]);
            command.arg("--export").arg(format!("{export},addr.type=unix,addr.path={}", socket.display()));
        })
    }

    fn machine(&self, kind: DeviceKind, queues: usize, incoming: bool) -> Result<Arc<KvmMachine>, Failure> {
        let device = VhostUserOptions {
            queues: kind.queues(queues),
            kind: Some(kind),
            answer_limit: Duration::from_secs(20),
            ..VhostUserOptions::new("vhost-user/0", self.directory.path().join("socket"))
        };
        let config = MachineConfig {
            guest: Some(guest()),
            incoming,
            vhost_user: vec![device],
            ..MachineConfig::new("transport")
        };
        let machine = KvmMachine::new(config).map_err(|error| self.explain(&error.to_string()))?;
        if !incoming {
            machine.resume().map_err(|error| error.to_string())?;
        }
        Ok(machine)
    }

    /// Changes the length of a storage daemon's disk.
    fn resize(&self, bytes: u64) -> Result<(), Failure> {
        let ask = || {
            let monitor = UnixStream::connect(self.directory.path().join("monitor"))?;
            let mut lines = BufReader::new(monitor.try_clone()?).lines();
            let mut answers = vec![lines.next()];
            let resize =
                format!(r#"{{"execute":"block_resize","arguments":{{"node-name":"d","size":{bytes}}}}}"#);
            for request in [r#"{"execute":"qmp_capabilities"}"#, &resize] {
                (&monitor).write_all(request.as_bytes())?;
                answers.push(lines.next());
            }
            Ok(format!("{answers:?}"))
        };
        let told = ask().map_err(|error: std::io::Error| error.to_string())?;
        if told.contains("error") { Err(told) } else { Ok(()) }
    }

    fn explain(&self, why: &str) -> Failure {
        let said = fs::read_to_string(self.directory.path().join("log")).unwrap_or_default();
        format!("{why}; the back end said: {}", said.trim())
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        // An error means that the process has ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            #[allow(clippy::print_stderr, reason = "a failing test says what it knows")]
            {
                eprintln!("{}", self.explain("the test failed"));
            }
        }
    }
}

/// The state of the guest's driver.
struct Driver {
    registers: Registers,
    queues: Vec<Virtqueue>,
}

impl Driver {
    fn start(machine: &KvmMachine, id: u32, features: u64, queues: u64) -> Self {
        let registers = Registers::of(0);
        assert_eq!(registers.read(machine, DEVICE_ID), id);
        assert!(registers.agree(machine, VERSION_1 | features));
        let queues: Vec<_> = (0..queues).map(|queue| Virtqueue::new(RINGS + queue * RING_STEP, 16)).collect();
        registers.start(machine, &queues.iter().map(Virtqueue::ring).collect::<Vec<_>>());
        Self { registers, queues }
    }

    fn wait(&mut self, machine: &KvmMachine, queue: usize) -> u32 {
        self.registers.wait(machine, &mut self.queues[queue], queue as u32).1
    }

    /// Puts a disk request into a queue. The answer's data and status go to the address `answer`.
    fn submit(
        &mut self,
        machine: &KvmMachine,
        queue: usize,
        sector: u64,
        data: Option<&[u8; SECTOR]>,
        answer: u64,
    ) {
        let block = machine.ram().block(0);
        let is_write = data.is_some();
        let header = [&u32::from(is_write).to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        let at = REQUEST + answer - ANSWER;
        block.write(at, &header).expect("inside RAM");
        block.write(answer, data.unwrap_or(&[0x77; SECTOR])).expect("inside RAM");
        block.write(answer + SECTOR as u64, &[0xff]).expect("inside RAM");
        let parts = [
            Part { address: at, len: 16, written: false },
            Part { address: answer, len: SECTOR as u32, written: !is_write },
            Part { address: answer + SECTOR as u64, len: 1, written: true },
        ];
        self.queues[queue].submit(machine.ram(), &parts).expect("a free slot");
    }

    /// The data at the address `answer`, after a check of the device's status.
    fn answer(machine: &KvmMachine, answer: u64) -> [u8; SECTOR] {
        let (mut data, mut status) = ([0; SECTOR], [0]);
        machine.ram().block(0).read(answer, &mut data).expect("inside RAM");
        machine.ram().block(0).read(answer + SECTOR as u64, &mut status).expect("inside RAM");
        assert_eq!(status, [0], "the disk says that it failed");
        data
    }

    fn read(&mut self, machine: &KvmMachine, queue: usize, sector: u64) -> [u8; SECTOR] {
        self.submit(machine, queue, sector, None, ANSWER);
        self.wait(machine, queue);
        Self::answer(machine, ANSWER)
    }

    /// Sends a FUSE request and returns its answer.
    fn ask(
        &mut self,
        machine: &KvmMachine,
        opcode: u32,
        unique: u64,
        inode: u64,
        body: &[u8],
        room: u32,
    ) -> Vec<u8> {
        let request = fuse::request(opcode, unique, inode, body);
        machine.ram().block(0).write(REQUEST, &request).expect("inside RAM");
        let parts = [
            Part { address: REQUEST, len: request.len() as u32, written: false },
            Part { address: ANSWER, len: fuse::OUT_HEADER as u32 + room, written: true },
        ];
        self.queues[1].submit(machine.ram(), &parts).expect("a free slot");
        let written = self.wait(machine, 1);
        let mut answer = vec![0; written as usize];
        machine.ram().block(0).read(ANSWER, &mut answer).expect("inside RAM");
        fuse::answer(&answer, unique).to_vec()
    }
}

fn sector(number: u64) -> [u8; SECTOR] {
    std::array::from_fn(|at| (number * 7 + at as u64 / 8) as u8)
}

fn image() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let bytes: Vec<u8> = (0..SECTORS).flat_map(sector).collect();
    fs::write(file.path(), bytes).expect("room");
    file
}

fn migrate(source: &Arc<KvmMachine>, target: &Arc<KvmMachine>) -> (Outcome, Arrival) {
    let address: Address = "tcp:127.0.0.1:0".parse().expect("an address");
    let capabilities = Capabilities::default();
    let incoming =
        Incoming::listen(target.clone(), &address, Parameters::default(), capabilities, Arc::new(()))
            .expect("a place");
    let migration = Migration::start(
        source.clone(),
        &incoming.address(),
        Parameters::default(),
        capabilities,
        Arc::new(()),
    );
    (migration.expect("a start").wait(), incoming.wait())
}

#[test]
fn disk_of_a_storage_daemon_is_read_and_moves_to_another_one() -> Result<(), Failure> {
    let test = "disk_of_a_storage_daemon_is_read_and_moves_to_another_one";
    let Some(root) = Root::qemu_for(test).filter(|_| kvm_for(test)) else { return Ok(()) };
    let image = image();
    for queues in [1, 2] {
        let back_ends = [
            BackEnd::storage_daemon(&root, image.path(), 2, 0)?,
            BackEnd::storage_daemon(&root, image.path(), 2, 0)?,
        ];
        let source = back_ends[0].machine(DeviceKind::Block, queues, false)?;
        let target = back_ends[1].machine(DeviceKind::Block, queues, true)?;
        let mut driver = Driver::start(&source, 2, 0, queues as u64);
        let last = queues - 1;
        let space = driver.registers.configuration(&source, 60);
        assert_eq!(
            (&space[..8], &space[34..36]),
            (&SECTORS.to_le_bytes()[..], &(queues as u16).to_le_bytes()[..])
        );
        assert_eq!(driver.read(&source, last, 5), sector(5));
        driver.submit(&source, last, 6, Some(&sector(99)), ANSWER);
        driver.wait(&source, last);
        assert_eq!(driver.read(&source, 0, 6), sector(99));
        // These requests are in flight when the guest stops.
        let place = |request: u64| ANSWER + request * 0x1000;
        for request in 0..10 {
            driver.submit(&source, last, 100 + request, None, place(request));
        }
        driver.registers.notify(&source, last as u32);

        let (outcome, arrival) = migrate(&source, &target);

        assert!(matches!(outcome, Outcome::Completed), "{outcome:?} {arrival:?}");
        let begin = Instant::now();
        while driver.queues[last].in_flight() > 0 {
            assert!(begin.elapsed() < PATIENCE, "requests are lost");
            driver.queues[last].take(target.ram());
        }
        for request in 0..10 {
            assert_eq!(Driver::answer(&target, place(request)), sector(100 + request));
        }
        driver.registers.acknowledge(&target, 1);
        assert_eq!(driver.read(&target, last, 6), sector(99));
        assert_eq!(driver.read(&target, 0, SECTORS - 1), sector(SECTORS - 1));
        // The log contains the device's writes into RAM, and its ring after it has stopped.
        let log = SourceVm::dirty_source(&*target);
        log.start().map_err(|error| error.to_string())?;
        driver.read(&target, last, 7);
        let mut dirty = DirtyBitmaps::new(target.ram());
        log.sync(&mut dirty).map_err(|error| error.to_string())?;
        assert!(dirty.block(0).get(ANSWER / 4096), "a sector was read and not logged");
        target.pause();
        log.sync(&mut dirty).map_err(|error| error.to_string())?;
        assert!(dirty.block(0).get(driver.queues[last].ring().used / 4096), "a used ring is not logged");
        log.stop().map_err(|error| error.to_string())?;
        target.cont().map_err(|error| error.to_string())?;
        // The driver is unloaded and loaded again.
        driver = Driver::begin_anew(&target, 2, queues as u64);
        driver.submit(&target, last, 6, Some(&sector(6)), ANSWER);
        driver.wait(&target, last);
        assert_eq!(driver.read(&target, 0, 6), sector(6));
    }
    Ok(())
}

#[test]
fn slow_disk_of_a_storage_daemon_moves_when_it_has_answered() -> Result<(), Failure> {
    let test = "slow_disk_of_a_storage_daemon_moves_when_it_has_answered";
    let Some(root) = Root::qemu_for(test).filter(|_| kvm_for(test)) else { return Ok(()) };
    let image = image();
    let slow = BackEnd::storage_daemon(&root, image.path(), 1, 10)?;
    let fast = BackEnd::storage_daemon(&root, image.path(), 1, 0)?;
    let source = slow.machine(DeviceKind::Block, 1, false)?;
    let target = fast.machine(DeviceKind::Block, 1, true)?;
    let mut driver = Driver::start(&source, 2, 0, 1);
    let place = |request: u64| ANSWER + request * 0x1000;
    for request in 0..15 {
        driver.submit(&source, 0, 100 + request, None, place(request));
    }
    driver.registers.notify(&source, 0);

    let (outcome, arrival) = migrate(&source, &target);

    assert!(matches!(outcome, Outcome::Completed), "{outcome:?} {arrival:?}");
    let begin = Instant::now();
    while driver.queues[0].in_flight() > 0 {
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "{} requests are lost",
            driver.queues[0].in_flight()
        );
        driver.queues[0].take(target.ram());
    }
    for request in 0..15 {
        assert_eq!(Driver::answer(&target, place(request)), sector(100 + request));
    }
    Ok(())
}

#[test]
fn disk_that_a_storage_daemon_makes_longer_is_told_to_the_driver() -> Result<(), Failure> {
    let test = "disk_that_a_storage_daemon_makes_longer_is_told_to_the_driver";
    let Some(root) = Root::qemu_for(test).filter(|_| kvm_for(test)) else { return Ok(()) };
    let image = image();
    let back_end = BackEnd::storage_daemon(&root, image.path(), 1, 0)?;
    let machine = back_end.machine(DeviceKind::Block, 1, false)?;
    let mut driver = Driver::start(&machine, 2, 0, 1);
    assert_eq!(driver.registers.configuration(&machine, 8), SECTORS.to_le_bytes());

    back_end.resize(2 * SECTORS * SECTOR as u64)?;

    driver.registers.acknowledge(&machine, 2);
    assert_eq!(driver.registers.configuration(&machine, 8), (2 * SECTORS).to_le_bytes());
    assert_eq!(driver.read(&machine, 0, 2 * SECTORS - 1), [0; SECTOR]);
    // The disk can move only to a daemon that sees the new length.
    let target = BackEnd::storage_daemon(&root, image.path(), 1, 0)?;
    let target = target.machine(DeviceKind::Block, 1, true)?;
    let record = machine.compatibility().save().map_err(|error| error.to_string())?;
    target.compatibility().load(1, &record).map_err(|error| error.to_string())?;
    Ok(())
}

#[test]
fn disk_with_fewer_queues_than_wanted_is_refused() -> Result<(), Failure> {
    let test = "disk_with_fewer_queues_than_wanted_is_refused";
    let Some(root) = Root::qemu_for(test).filter(|_| kvm_for(test)) else { return Ok(()) };
    let image = image();
    let daemon = BackEnd::storage_daemon(&root, image.path(), 1, 0)?;

    let why = daemon.machine(DeviceKind::Block, 2, true).expect_err("it has one");

    assert!(why.contains("vhost-user/0") && why.contains("2 queues"), "{why}");
    // The daemon continues to listen.
    daemon.machine(DeviceKind::Block, 1, true)?;
    Ok(())
}

#[test]
fn file_system_of_a_virtiofsd_is_mounted_and_moves_to_another_one() -> Result<(), Failure> {
    let test = "file_system_of_a_virtiofsd_is_mounted_and_moves_to_another_one";
    let Some(root) = Root::qemu_for(test).filter(|_| kvm_for(test)) else { return Ok(()) };
    let shared = TempDir::new().map_err(|error| error.to_string())?;
    fs::write(shared.path().join("file"), "what stands in it").map_err(|error| error.to_string())?;
    // The tag is from the options first, and then from the back end.
    for (options, tag) in [(&[][..], Some("share".to_owned())), (&["--tag", "share"][..], None)] {
        let back_ends = [
            BackEnd::virtiofsd(&root, shared.path(), options)?,
            BackEnd::virtiofsd(&root, shared.path(), options)?,
        ];
        let kind = DeviceKind::FileSystem { tag };
        let source = back_ends[0].machine(kind.clone(), 1, false)?;
        let target = back_ends[1].machine(kind, 1, true)?;
        let mut driver = Driver::start(&source, 26, 0, 2);
        let space = driver.registers.configuration(&source, 40);
        assert_eq!((&space[..6], &space[36..]), (&b"share\0"[..], &[1, 0, 0, 0][..]));
        let answer = driver.ask(&source, fuse::INIT, 2, 0, &fuse::init(), 4096);
        assert_eq!(answer[..4], 7u32.to_le_bytes());
        let inode =
            fuse::word(&driver.ask(&source, fuse::LOOKUP, 4, fuse::ROOT, &fuse::name("file"), 4096), 0);
        let handle = fuse::word(&driver.ask(&source, fuse::OPEN, 6, inode, &fuse::open(), 4096), 0);

        let (outcome, arrival) = migrate(&source, &target);

        assert!(matches!(outcome, Outcome::Completed), "{outcome:?} {arrival:?}");
        let found = driver.ask(&target, fuse::READ, 8, inode, &fuse::place(handle, 0, 100), 100);
        assert_eq!(String::from_utf8_lossy(&found), "what stands in it");
        // The driver is unloaded and loaded again.
        driver = Driver::begin_anew(&target, 26, 2);
        let answer = driver.ask(&target, fuse::INIT, 2, 0, &fuse::init(), 4096);
        assert_eq!(answer[..4], 7u32.to_le_bytes());
    }
    Ok(())
}

impl Driver {
    fn begin_anew(machine: &KvmMachine, id: u32, queues: u64) -> Self {
        Registers::of(0).write(machine, crate::registers::STATUS, 0);
        machine.ram().block(0).write(RINGS, &vec![0; 2 * RING_STEP as usize]).expect("inside RAM");
        Self::start(machine, id, 0, queues)
    }
}
