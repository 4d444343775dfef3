//! What a machine is made of. A clone of a builder makes a machine that can take over the first's state.

use std::process::Command;

use crate::qemu::Qemu;
use crate::{Failure, Guest, Root};

/// What runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Accelerator {
    /// QEMU itself.
    #[default]
    Tcg,
    /// The host's KVM.
    Kvm,
    /// Nothing: the guest stands still even if it may run.
    Nothing,
}

/// Where the guest's RAM comes from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Ram {
    /// Anonymous memory, as QEMU does by itself; the block is called after the machine (`pc.ram`).
    #[default]
    Anonymous,
    /// An object `ram0`, anonymous.
    Object,
    /// An object `ram0`, a shared memfd.
    Memfd,
    /// An object `ram0`, a shared file in the machine's directory.
    File,
    /// An object `ram0`, a shared memfd of 2 MiB pages, which the host must have set aside.
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

/// A machine to be started. See [`Qemu::builder`].
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
    /// A `pc` of 64 MiB under TCG, without a guest and without any device that was not asked for.
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
    /// `pc`, `q35`, `microvm`, with any options behind a comma.
    pub fn machine(mut self, machine: &str) -> Self {
        self.machine = machine.into();
        self
    }

    /// TCG, KVM, or nothing.
    pub fn accelerator(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = accelerator;
        self
    }

    /// KVM where there is one: for guests that write while they are moved. Under TCG, on a busy machine, QEMU now and
    /// then leaves out a page that was written again (`specs/stream.md §10`).
    pub fn kvm_if_any(self) -> Self {
        let accelerator = if crate::root::has_kvm() { Accelerator::Kvm } else { Accelerator::Tcg };
        self.accelerator(accelerator)
    }

    /// RAM, in MiB.
    pub fn memory_mib(mut self, memory_mib: u64) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Where RAM comes from.
    pub fn ram(mut self, ram: Ram) -> Self {
        self.ram = ram;
        self
    }

    /// What it runs.
    pub fn guest(mut self, guest: Guest) -> Self {
        self.guest = guest;
        self
    }

    /// It waits for `migrate-incoming`.
    pub fn incoming_defer(mut self) -> Self {
        self.incoming = true;
        self
    }

    /// One more argument.
    pub fn arg(mut self, argument: &str) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// More arguments.
    pub fn args(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }

    /// Starts it.
    ///
    /// # Errors
    /// It did not come up; the text holds what it said.
    pub fn spawn(self) -> Result<Qemu, Failure> {
        let directory = tempfile::Builder::new()
            .prefix("sterna-")
            .tempdir()
            .map_err(|error| format!("no temporary directory: {error}"))?;
        let command = self.command_in(directory.path())?;
        Qemu::start(command, directory)
    }

    /// The command line with the monitors and the serial port in `directory`, for a test that gives it to
    /// Sterna to start.
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
