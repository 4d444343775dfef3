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
    /// A VM that is made from the source's configuration, where no source can send one.
    #[error(
        "a VM is made from the source's configuration only over tcp:, unix: and descriptors: make the VM first and use \
         Incoming::listen"
    )]
    ConfigurationNeedsSocket,
    /// A feature that this build of the engine lacks.
    #[error(
        "{what} needs the Cargo feature {cargo_feature:?} of the crate sterna, which this program was built without: \
         build the program with that feature, or do without"
    )]
    NotCompiled {
        /// The refused setting or address.
        what: &'static str,
        /// The Cargo feature that adds it.
        cargo_feature: &'static str,
    },
    /// Multifd is on with 0 channels.
    #[error("multifd_channels is 0: give 1 to 255, or switch multifd off")]
    NoChannels,
    /// Multifd with a file that contains a stream.
    #[error("a file with a stream is one channel: switch multifd off, or mapped_ram on")]
    FileIsOneChannel,
    /// Multifd over a single descriptor.
    #[error("a descriptor is one channel: switch multifd off, or give the address of a TCP or Unix socket")]
    DescriptorIsOneChannel,
    /// A reconnect window over a connection that cannot be replaced.
    #[error(
        "a lost connection over {over} cannot be replaced: set reconnect_window to 0, or give the address of a TCP or \
         Unix socket"
    )]
    CannotReconnect {
        /// What the connection is made of, as the message names it: a connected socket, or RDMA.
        over: &'static str,
    },
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
    #[error("mapped_ram does not support compressed pages: set multifd_compression to none")]
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
    #[error("switchover_ack needs return_path, which carries the acknowledgement: switch it on, too")]
    AckNeedsReturnPath,
    /// The VM has no [`Throttle`](crate::Throttle).
    #[error("this VM cannot be slowed down: switch auto_converge off")]
    NoThrottle,
    /// The VM's [`Throttle`](crate::Throttle) does not count each vCPU's dirty rate.
    #[error(
        "dirty_limit needs a VM that counts the dirty pages of each vCPU, such as a VM with a dirty ring: use \
         auto_converge"
    )]
    NoDirtyLimit,
    /// The peer of an image is another file.
    #[error("an image cannot be sent to a file: convert it instead")]
    ImageIntoFile,
    /// TLS credentials with RDMA.
    #[error("rdma: does not support TLS, because adapters write memory unencrypted: give no credentials")]
    RdmaHasNoTls,
    /// Page compression with RDMA.
    #[error(
        "rdma: does not support compressed pages, because adapters write pages directly to their place: set \
         multifd_compression to none"
    )]
    RdmaIsUncompressed,
    /// An image with an RDMA address.
    #[error(
        "rdma: cannot send or receive an image, because remote writes need memory of the guest's size: use tcp: or \
         unix:"
    )]
    ImageOverRdma,
    /// A standby that any host can reach without authentication.
    #[error(
        "any client that reaches this address could send the standby another guest: use TLS with a client certificate \
         (--tls-dir), a common secret (--secret), a Unix socket, or on loopback --insecure"
    )]
    OpenStandby,
    /// A standby at an address that cannot carry checkpoints.
    #[error("a standby needs an address with a return path: give tcp: or unix:")]
    NoStandbyThere,
    /// A primary without the return path that carries the standby's answers.
    #[error("a standby acknowledges checkpoints over the return path: switch the return path on")]
    StandbyNeedsReturnPath,
    /// A device with a stream whose state checkpoints do not carry.
    #[error(
        "device {device:?} streams its state, which checkpoints cannot contain: protect the guest without this device"
    )]
    DeviceCannotBeProtected {
        /// Name of the device.
        device: String,
    },
    /// `xbzrle` in a migration that hands the guest over.
    #[error(
        "xbzrle is supported only in the checkpoints of a protected guest: switch it off, or protect the guest with a \
         standby"
    )]
    DeltaNeedsStandby,
    /// The interval between checkpoints is too short.
    #[error("the interval between checkpoints is too short: give at least {} ms", least.as_millis())]
    CheckpointDelay {
        /// The shortest interval.
        least: std::time::Duration,
    },
    /// The number of checkpoints in flight is out of range.
    #[error("the number of checkpoints that may be on their way to the standby must be 1 to 4")]
    CheckpointsInFlight,
    /// The standby's journal has no room for a checkpoint.
    #[error("the journal's limit is smaller than one page: give the largest size of a checkpoint in bytes")]
    NoJournal,
    /// `cpr-transfer` over a transport that cannot carry descriptors.
    #[error(
        "mode cpr-transfer passes memory as descriptors, which only a Unix socket can transfer: give unix:PATH, or \
         set mode to normal"
    )]
    CprNeedsUnix,
    /// `cpr-transfer` with a feature that copies memory, or that implies a peer on another host.
    #[error(
        "mode cpr-transfer copies no memory and cannot be combined with {what}: change that, or set mode to normal"
    )]
    CprExcludes {
        /// Name of the feature, as in [`Capabilities`](crate::Capabilities) and [`Parameters`](crate::Parameters).
        what: &'static str,
    },
    /// `cpr-transfer` of an image, which has no memory to hand over.
    #[error(
        "mode cpr-transfer passes the memory of a running VM, which an image does not have: set mode to normal"
    )]
    CprOfImage,
    /// Postcopy with a feature that excludes it.
    #[error("postcopy_ram cannot be combined with {what}: change one of the two")]
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
        "postcopy_ram: {device} needs all of the guest's memory from the start: migrate the guest without this \
         device, or switch postcopy_ram off"
    )]
    PostcopyExcludesDevice {
        /// Name of the device.
        device: String,
    },
    /// A live save with a feature that excludes it.
    #[error(
        "a live save cannot be combined with {what}: a live save writes one stream, while the guest runs; change that"
    )]
    LiveSaveExcludes {
        /// Name of the feature, as in [`Capabilities`](crate::Capabilities) and [`Parameters`](crate::Parameters).
        what: &'static str,
    },
    /// A live save of a VM whose guest's writes cannot all be held.
    #[error(
        "a live save holds the guest's writes, and this VM does not permit that: other processes or devices (vhost-user, \
         vfio-user, VFIO) may write its guest's memory. Save the guest without --live, which pauses it"
    )]
    CannotHoldWrites,
    /// A live save with a device whose stream cannot be read at one moment.
    #[error(
        "device {device:?} streams its state, which a live save cannot contain: save the guest without --live, or run it \
         without this device"
    )]
    LiveSaveExcludesDevice {
        /// Name of the device.
        device: String,
    },
    /// A recovery over a transport that cannot carry it.
    #[error(
        "a paused postcopy can continue only over TCP, a Unix socket, or (if postcopy_preempt is off) one descriptor: \
         give such an address"
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
        "postcopy-preempt needs a second connection, which cannot be assigned to a guest if the destinations connect \
         to this side: connect to the destination instead, or switch postcopy-preempt off there"
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
