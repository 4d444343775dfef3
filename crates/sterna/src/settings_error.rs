//! Settings that make no sense, or come at the wrong time.

use sterna_transport::TlsEndpoint;

/// Why settings are refused. Names in its sentences are those of the fields of [`Parameters`](crate::Parameters) and
/// [`Capabilities`](crate::Capabilities).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// Settings that are fixed when a migration starts were to change while it runs. Nothing was changed.
    #[error("{} cannot change while the migration runs: set them for the next one", fields.join(", "))]
    NotLive {
        /// Which.
        fields: Vec<&'static str>,
    },
    /// Multifd without a channel.
    #[error("multifd_channels is 0: give 1 to 255, or switch multifd off")]
    NoChannels,
    /// Multifd into or out of a file that holds a stream.
    #[error("a file that holds a stream is one channel: switch multifd off, or mapped_ram on")]
    FileIsOneChannel,
    /// Multifd over a descriptor.
    #[error("a descriptor is one channel: switch multifd off, or give the address of a TCP or Unix socket")]
    DescriptorIsOneChannel,
    /// TLS with a file.
    #[error("a file does not support TLS: give no credentials")]
    FileHasNoTls,
    /// A file as the destination that is to acknowledge.
    #[error("switchover_ack needs a destination that answers, which a file does not: switch it off")]
    FileDoesNotAnswer,
    /// Mapped RAM over a channel.
    #[error("mapped_ram needs a file: switch it off")]
    MappedNeedsFile,
    /// Mapped RAM with compression.
    #[error("mapped_ram stores pages as they are: set multifd_compression to none")]
    MappedIsUncompressed,
    /// Credentials for the other end of a connection.
    #[error("the TLS credentials are for the other end of the connection: this side is the {}", end(*needed))]
    WrongCredentials {
        /// Which end this side is.
        needed: TlsEndpoint,
    },
    /// Two ways to slow the guest down.
    #[error("dirty_limit and auto_converge exclude each other: switch one of them off")]
    TwoThrottles,
    /// The acknowledgement has no way to come.
    #[error("switchover_ack needs return_path: the acknowledgement comes on it")]
    AckNeedsReturnPath,
    /// The VM has no [`Throttle`](crate::Throttle).
    #[error("this VM cannot be slowed down: switch auto_converge off")]
    NoThrottle,
    /// The VM's [`Throttle`](crate::Throttle) does not count what vCPUs dirty.
    #[error(
        "dirty_limit needs a VM that counts what each vCPU dirties, as one with a dirty ring does: use auto_converge"
    )]
    NoDirtyLimit,
    /// An image to or from another file.
    #[error("an image goes into another file by converting it")]
    ImageIntoFile,
    /// TLS over RDMA.
    #[error("rdma: carries no TLS, since the adapter writes memory as it is: give no credentials")]
    RdmaHasNoTls,
    /// Compression over RDMA.
    #[error(
        "rdma: carries no compressed pages, since bytes that must be unpacked cannot be written in place: set \
         multifd_compression to none"
    )]
    RdmaIsUncompressed,
    /// An image to or from an address of RDMA.
    #[error(
        "an image does not go over rdma:, since remote writes need memory of the guest's size: use tcp: or unix:"
    )]
    ImageOverRdma,
    /// A standby that anybody can reach.
    #[error(
        "anybody who reaches this address could give the standby another guest: use TLS with a client's certificate \
         (--tls-dir), a common secret (--secret) or a Unix socket; on loopback --insecure will do"
    )]
    OpenStandby,
    /// A standby at an address that brings no checkpoints.
    #[error("a standby listens at tcp: or unix:, where its primary can be answered: give such an address")]
    NoStandbyThere,
    /// A primary that its standby could not answer.
    #[error("a standby promises what it holds over the return path: switch the return path on")]
    StandbyNeedsReturnPath,
    /// A device whose large state no checkpoint carries.
    #[error(
        "device {device:?} streams its state, which checkpoints do not carry: take the device off the guest before it is \
         protected"
    )]
    DeviceCannotBeProtected {
        /// Its name.
        device: String,
    },
    /// Differences in a migration that hands the guest over.
    #[error(
        "xbzrle is sent in the checkpoints of a protected guest alone: switch it off, or protect the guest with a standby"
    )]
    DeltaNeedsStandby,
    /// Checkpoints without time between them.
    #[error("the interval between checkpoints is too short: {} ms at least", least.as_millis())]
    CheckpointDelay {
        /// The shortest.
        least: std::time::Duration,
    },
    /// None at all, or more than wait for their turn.
    #[error("1 to 4 checkpoints may be on their way at once")]
    CheckpointsInFlight,
    /// A standby without room for checkpoints.
    #[error("the journal's limit is smaller than one page: give the bytes that a checkpoint may bring")]
    NoJournal,
    /// Memory as descriptors over something that carries none.
    #[error(
        "mode cpr-transfer moves memory as descriptors, which a Unix socket alone carries: give unix:PATH, or set mode to normal"
    )]
    CprNeedsUnix,
    /// Memory as descriptors, with something that belongs to copying it or to a peer on another host.
    #[error(
        "mode cpr-transfer copies no memory and does not go with {what}: switch it off, or set mode to normal"
    )]
    CprExcludes {
        /// What, as [`Capabilities`](crate::Capabilities) and [`Parameters`](crate::Parameters) call it.
        what: &'static str,
    },
    /// An image has no memory that could be handed over.
    #[error(
        "mode cpr-transfer hands over the memory of a running VM, and an image is none: set mode to normal"
    )]
    CprOfImage,
    /// Postcopy with something that does not go with it.
    #[error("postcopy_ram does not go with {what}: switch one of them off")]
    PostcopyExcludes {
        /// What, as [`Capabilities`](crate::Capabilities) and [`Parameters`](crate::Parameters) call it.
        what: &'static str,
    },
    /// Something of postcopy without postcopy.
    #[error("{what} needs postcopy_ram: switch it on, too")]
    NeedsPostcopy {
        /// What.
        what: &'static str,
    },
    /// A guest whose pages must be there before it runs.
    #[error(
        "postcopy_ram: {device} needs all of the guest's memory at once: take it off the guest, or switch postcopy_ram off"
    )]
    PostcopyExcludesDevice {
        /// What it is.
        device: String,
    },
    /// A recovery over what cannot carry it.
    #[error(
        "a paused postcopy goes on over TCP or a Unix socket, or over one descriptor if postcopy_preempt is off: give such an \
         address"
    )]
    NoWayToRecover,
    /// A machine of an old QEMU over multifd.
    #[error(
        "machine type {machine_type:?} flushes multifd channels in QEMU 8.0's way, which Sterna does not send: switch \
         multifd off on both sides"
    )]
    FlushesSilently {
        /// The image's.
        machine_type: String,
    },
    /// Destinations that connect to this side, and a second connection for each.
    #[error(
        "postcopy-preempt needs a second connection, and where destinations connect nobody can tell whose it is: dial the          destination, or switch postcopy-preempt off there"
    )]
    PreemptNeedsDial,
}

fn end(endpoint: TlsEndpoint) -> &'static str {
    match endpoint {
        TlsEndpoint::Client => "client",
        TlsEndpoint::Server => "server",
    }
}
