//! Settings of a QEMU machine. A clone of a builder makes a machine that can take over the first one's state.

use std::process::Command;

use crate::qemu::Qemu;
use crate::{Failure, Guest, Root};

/// How the guest's instructions are executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Accelerator {
    /// QEMU's own translator.
    #[default]
    Tcg,
    /// KVM of the host.
    Kvm,
    /// No execution: the guest makes no progress even if it is resumed.
    Nothing,
}

/// The memory that backs the guest's RAM.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Ram {
    /// Anonymous memory, QEMU's default. The block has the machine's name for it (`pc.ram`).
    #[default]
    Anonymous,
    /// An object `ram0` with anonymous memory.
    Object,
    /// An object `ram0` with a shared memfd.
    Memfd,
    /// An object `ram0` with a shared file in the machine's directory.
    File,
    /// An object `ram0` with a shared memfd of 2 MiB pages. The host must have reserved them.
    Hugetlb,
}

impl Ram {
    fn arguments(&self, memory_mib: u64, directory: &str) -> Vec<String> {
        let kind = match self {
            Self::Anonymous => return Vec::new(),
            Self::Object => "memory-backend-ram,".to_owned(),
            Self::Memfd => "memory-backend-memfd,share=on,".to_owned(),
            Self::File => format!("memory-backend-file,share=on,mem-path={directory}/ram,"),
            Self::Hugetlb => "memory-backend-memfd,share=on,hugetlb=on,hugetlbsize=2M,".to_owned(),
        };
        vec!["-object".into(), format!("{kind}id=ram0,size={memory_mib}M")]
    }
}

/// Settings of a machine that is not started yet. See [`Qemu::builder`].
#[derive(Debug, Clone)]
pub struct Builder {
    root: Root,
    accelerator: Accelerator,
    machine: String,
    memory_mib: u64,
    ram: Ram,
    guest: Guest,
    incoming: bool,
    arguments: Vec<String>,
}

impl Qemu {
    /// A `pc` of 64 MiB under TCG, without a guest and without unrequested devices.
    pub fn builder(root: &Root) -> Builder {
        Builder {
            root: root.clone(),
            accelerator: Accelerator::default(),
            machine: "pc".into(),
            memory_mib: 64,
            ram: Ram::default(),
            guest: Guest::default(),
            incoming: false,
            arguments: Vec::new(),
        }
    }
}

impl Builder {
    /// Machine type: `pc`, `q35`, `microvm`, with any options after a comma.
    pub fn machine(mut self, machine: &str) -> Self {
        self.machine = machine.into();
        self
    }

    /// How instructions are executed; the default is TCG.
    pub fn accelerator(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = accelerator;
        self
    }

    /// Uses KVM if it is available, for guests that write during a move. Under TCG on a busy machine, QEMU
    /// sometimes skips a page that was written again (`specs/stream.md §10`).
    pub fn kvm_if_any(self) -> Self {
        let accelerator = if crate::root::has_kvm() { Accelerator::Kvm } else { Accelerator::Tcg };
        self.accelerator(accelerator)
    }

    /// Size of RAM, in MiB.
    pub fn memory_mib(mut self, memory_mib: u64) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// The memory that backs RAM.
    pub fn ram(mut self, ram: Ram) -> Self {
        self.ram = ram;
        self
    }

    /// The guest that the machine boots.
    pub fn guest(mut self, guest: Guest) -> Self {
        self.guest = guest;
        self
    }

    /// Makes the machine wait for `migrate-incoming`.
    pub fn incoming_defer(mut self) -> Self {
        self.incoming = true;
        self
    }

    /// Adds an argument of QEMU.
    pub fn arg(mut self, argument: &str) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Adds several arguments of QEMU.
    pub fn args(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }

    /// Starts the machine.
    ///
    /// # Errors
    /// QEMU did not start. The text contains its output.
    pub fn spawn(self) -> Result<Qemu, Failure> {
        let directory = tempfile::Builder::new()
            .prefix("sterna-")
            .tempdir()
            .map_err(|error| format!("no temporary directory: {error}"))?;
        let command = self.command_in(directory.path())?;
        Qemu::start(command, directory)
    }

    /// The command line, for a test in which Sterna starts the machine. Monitors and serial port are in
    /// `directory`.
    ///
    /// # Errors
    /// The guest's files could not be prepared.
    pub fn command_in(&self, directory: &std::path::Path) -> Result<Command, Failure> {
        let place = directory.display().to_string();
        let backend = self.ram.arguments(self.memory_mib, &place);
        let mut machine = self.machine.clone();
        if !backend.is_empty() {
            machine.push_str(",memory-backend=ram0");
        }
        let mut command = self.root.qemu_system();
        command.args(["-nodefaults", "-no-user-config", "-display", "none"]);
        command.args(["-machine", &machine, "-m", &format!("{}M", self.memory_mib)]);
        command.args(match self.accelerator {
            Accelerator::Tcg => ["-accel", "tcg"],
            Accelerator::Kvm => ["-accel", "kvm"],
            Accelerator::Nothing => ["-accel", "qtest"],
        });
        command.args(backend);
        for monitor in ["qmp", "operator"] {
            command.args(["-qmp", &format!("unix:{place}/{monitor},server=on,wait=off")]);
        }
        command.args(["-serial", &format!("file:{place}/serial")]);
        command.args(self.guest.arguments(&self.root, &self.machine, self.memory_mib, directory)?);
        command.args(&self.arguments);
        if self.incoming {
            command.args(["-incoming", "defer"]);
        }
        Ok(command)
    }
}
