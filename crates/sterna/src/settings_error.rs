//! Errors for settings that contradict each other, or that cannot change at this time.

use sterna_transport::TlsEndpoint;

/// Why settings are refused. Messages use the names of the fields of [`Parameters`](crate::Parameters) and
/// [`Capabilities`](crate::Capabilities).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// A call would change settings that are fixed while a migration runs. Nothing was changed.
    #[error("{} cannot change while the migration runs: set them for the next one", fields.join(", "))]
    NotLive {
        /// Names of these settings.
        fields: Vec<&'static str>,
    },
    /// Multifd is on with 0 channels.
    #[error("multifd_channels is 0: give 1 to 255, or switch multifd off")]
    NoChannels,
    /// Multifd with a file that contains a stream.
    #[error("a file that holds a stream is one channel: switch multifd off, or mapped_ram on")]
    FileIsOneChannel,
    /// Multifd over a single descriptor.
    #[error("a descriptor is one channel: switch multifd off, or give the address of a TCP or Unix socket")]
    DescriptorIsOneChannel,
    /// TLS credentials with a file.
    #[error("a file does not support TLS: give no credentials")]
    FileHasNoTls,
    /// `switchover_ack` with a file, which cannot acknowledge.
    #[error("switchover_ack needs a destination that answers, which a file does not: switch it off")]
    FileDoesNotAnswer,
    /// Mapped RAM with a destination other than a file.
    #[error("mapped_ram needs a file: switch it off")]
    MappedNeedsFile,
    /// Mapped RAM with page compression.
    #[error("mapped_ram stores pages as they are: set multifd_compression to none")]
    MappedIsUncompressed,
    /// TLS credentials for the other end of the connection.
    #[error("the TLS credentials are for the other end of the connection: this side is the {}", end(*needed))]
    WrongCredentials {
        /// Which end this side is.
        needed: TlsEndpoint,
    },
    /// Two throttling methods are enabled.
    #[error("dirty_limit and auto_converge exclude each other: switch one of them off")]
    TwoThrottles,
    /// `switchover_ack` without the return path that carries the acknowledgement.
    #[error("switchover_ack needs return_path: the acknowledgement comes on it")]
    AckNeedsReturnPath,
    /// The VM has no [`Throttle`](crate::Throttle).
    #[error("this VM cannot be slowed down: switch auto_converge off")]
    NoThrottle,
    /// The VM's [`Throttle`](crate::Throttle) does not count each vCPU's dirty rate.
    #[error(
        "dirty_limit needs a VM that counts what each vCPU dirties, as one with a dirty ring does: use auto_converge"
    )]
    NoDirtyLimit,
    /// The peer of an image is another file.
    #[error("an image goes into another file by converting it")]
    ImageIntoFile,
    /// TLS credentials with RDMA.
    #[error("rdma: carries no TLS, since the adapter writes memory as it is: give no credentials")]
    RdmaHasNoTls,
    /// Page compression with RDMA.
    #[error(
        "rdma: carries no compressed pages, since bytes that must be unpacked cannot be written in place: set \
         multifd_compression to none"
    )]
    RdmaIsUncompressed,
    /// An image with an RDMA address.
    #[error(
        "an image does not go over rdma:, since remote writes need memory of the guest's size: use tcp: or unix:"
    )]
    ImageOverRdma,
    /// A standby that any host can reach without authentication.
    #[error(
        "anybody who reaches this address could give the standby another guest: use TLS with a client's certificate \
         (--tls-dir), a common secret (--secret) or a Unix socket; on loopback --insecure will do"
    )]
    OpenStandby,
    /// A standby at an address that cannot carry checkpoints.
    #[error("a standby listens at tcp: or unix:, where its primary can be answered: give such an address")]
    NoStandbyThere,
    /// A primary without the return path that carries the standby's answers.
    #[error("a standby promises what it holds over the return path: switch the return path on")]
    StandbyNeedsReturnPath,
    /// A device with a stream whose state checkpoints do not carry.
    #[error(
        "device {device:?} streams its state, which checkpoints do not carry: take the device off the guest before it is \
         protected"
    )]
    DeviceCannotBeProtected {
        /// Name of the device.
        device: String,
    },
    /// `xbzrle` in a migration that hands the guest over.
    #[error(
        "xbzrle is sent in the checkpoints of a protected guest alone: switch it off, or protect the guest with a standby"
    )]
    DeltaNeedsStandby,
    /// The interval between checkpoints is too short.
    #[error("the interval between checkpoints is too short: {} ms at least", least.as_millis())]
    CheckpointDelay {
        /// The shortest interval.
        least: std::time::Duration,
    },
    /// The number of checkpoints in flight is out of range.
    #[error("1 to 4 checkpoints may be on their way at once")]
    CheckpointsInFlight,
    /// The standby's journal has no room for a checkpoint.
    #[error("the journal's limit is smaller than one page: give the bytes that a checkpoint may bring")]
    NoJournal,
    /// `cpr-transfer` over a transport that cannot carry descriptors.
    #[error(
        "mode cpr-transfer moves memory as descriptors, which a Unix socket alone carries: give unix:PATH, or set mode to normal"
    )]
    CprNeedsUnix,
    /// `cpr-transfer` with a feature that copies memory, or that implies a peer on another host.
    #[error(
        "mode cpr-transfer copies no memory and does not go with {what}: switch it off, or set mode to normal"
    )]
    CprExcludes {
        /// Name of the feature, as in [`Capabilities`](crate::Capabilities) and [`Parameters`](crate::Parameters).
        what: &'static str,
    },
    /// `cpr-transfer` of an image, which has no memory to hand over.
    #[error(
        "mode cpr-transfer hands over the memory of a running VM, and an image is none: set mode to normal"
    )]
    CprOfImage,
    /// Postcopy with a feature that excludes it.
    #[error("postcopy_ram does not go with {what}: switch one of them off")]
    PostcopyExcludes {
        /// Name of the feature, as in [`Capabilities`](crate::Capabilities) and [`Parameters`](crate::Parameters).
        what: &'static str,
    },
    /// A postcopy feature without postcopy.
    #[error("{what} needs postcopy_ram: switch it on, too")]
    NeedsPostcopy {
        /// Name of the feature.
        what: &'static str,
    },
    /// Postcopy with a device that needs all memory before the guest runs.
    #[error(
        "postcopy_ram: {device} needs all of the guest's memory at once: take it off the guest, or switch postcopy_ram off"
    )]
    PostcopyExcludesDevice {
        /// Name of the device.
        device: String,
    },
    /// A recovery over a transport that cannot carry it.
    #[error(
        "a paused postcopy goes on over TCP or a Unix socket, or over one descriptor if postcopy_preempt is off: give such an \
         address"
    )]
    NoWayToRecover,
    /// Multifd with a machine type of an old QEMU.
    #[error(
        "machine type {machine_type:?} flushes multifd channels in QEMU 8.0's way, which Sterna does not send: switch \
         multifd off on both sides"
    )]
    FlushesSilently {
        /// The image's machine type.
        machine_type: String,
    },
    /// `postcopy-preempt` where destinations connect to this side.
    #[error(
        "postcopy-preempt needs a second connection, and where destinations connect nobody can tell whose it is: dial the \
         destination, or switch postcopy-preempt off there"
    )]
    PreemptNeedsDial,
}

fn end(endpoint: TlsEndpoint) -> &'static str {
    match endpoint {
        TlsEndpoint::Client => "client",
        TlsEndpoint::Server => "server",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_single_spaces() {
        assert!(!SettingsError::PreemptNeedsDial.to_string().contains("  "));
    }
}
