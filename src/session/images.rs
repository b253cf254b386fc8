//! Prepares images for a model: checks them, and scales them down if they are larger than models
//! use. Of an animation the first frame is shown, as a PNG, which every client supports.
//!
//! The bytes come from inside and may be a decompression bomb. The number of pixels is therefore
//! read from the header before anything is decoded, decoding has a memory limit, the whole server
//! decodes few images at a time, and the images of one cell have a processor time budget.

use std::io::Cursor;
use std::time::Duration;

use image::codecs::jpeg::JpegEncoder;
use image::imageops::FilterType;
use image::{DynamicImage, ImageFormat, ImageReader, Limits};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Semaphore;

use super::{Image, ImageType};

/// Models scale down images with a longer side, so more would only add cost.
const MAX_SIDE_LENGTH: u32 = 1568;
/// Clients reject larger images after base64 encoding (5 MB).
const MAX_BYTES: usize = 3_750_000;
/// More pixels on a side are a mistake or an attack.
const MAX_SIDE_READ_BYTES: u32 = 20_000;
/// More pixels than a camera or a large figure has. Decoding this many takes half a second.
const MAX_PIXELS: u64 = 32_000_000;
/// Limit for pixels times scans of a progressive JPEG, because each scan covers all pixels. Typical
/// files have about ten scans.
const MAX_PIXELS_SCANNED: u64 = 12 * MAX_PIXELS;
/// Four bytes for each pixel.
const DECODING_MEMORY: u64 = 128 * 1024 * 1024;
/// Processor time budget for the images of one cell.
const BUDGET: Duration = Duration::from_secs(5);
/// How long an image may wait while others are decoded.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// Images that the whole server decodes concurrently.
static DECODERS: Semaphore = Semaphore::const_new(2);

/// Reason why an image cannot be shown, as the end of the sentence "an image is not shown because
/// …".
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadImage {
    #[error("its bytes are not a readable PNG, JPEG, GIF or WebP")]
    Corrupt,
    #[error(
        "it is too large to be read: {width} × {height} pixels, and the limit is {} million. Show \
         a smaller one",
        MAX_PIXELS / 1_000_000
    )]
    TooLarge { width: u32, height: u32 },
    #[error(
        "it has too many scans for its size. Save it as a PNG or as a JPEG that is not progressive"
    )]
    TooManyScans,
    #[error("the images before it took more than {} s of processor time. Show fewer or smaller \
             ones in one cell", BUDGET.as_secs())]
    OutOfTime,
    #[error("the server was busy with other images for {} s. Show it again \
             later", MAX_WAIT.as_secs())]
    Busy,
}

/// Checks the images of one cell, and scales them down if necessary.
pub(super) async fn encode_all(images: Vec<Vec<u8>>) -> Vec<Result<Image, BadImage>> {
    encode_within(images, &DECODERS, BUDGET).await
}

async fn encode_within(
    images: Vec<Vec<u8>>,
    decoders: &'static Semaphore,
    budget: Duration,
) -> Vec<Result<Image, BadImage>> {
    let mut spent = Duration::ZERO;
    let mut encoded = Vec::with_capacity(images.len());
    for bytes in images {
        encoded.push(if spent >= budget {
            Err(BadImage::OutOfTime)
        } else {
            // One permit per image rather than per cell, so that cells take turns.
            match tokio::time::timeout(MAX_WAIT, decoders.acquire()).await {
                Ok(Ok(place)) => {
                    let decoded = tokio::task::spawn_blocking(move || {
                        let before = thread_time();
                        let image = encode(bytes);
                        drop(place);
                        (image, thread_time().saturating_sub(before))
                    });
                    let (image, time) = decoded.await.unwrap_or((Err(BadImage::Corrupt), budget));
                    spent += time;
                    image
                }
                _ => Err(BadImage::Busy),
            }
        });
    }
    encoded
}

fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or_default(),
    )
}

/// Checks an image and scales it down if necessary. This is CPU-bound; call it where blocking is
/// allowed.
pub(super) fn encode(bytes: Vec<u8>) -> Result<Image, BadImage> {
    let (format, kind) = match image::guess_format(&bytes) {
        Ok(ImageFormat::Png) => (ImageFormat::Png, ImageType::Png),
        Ok(ImageFormat::Jpeg) => (ImageFormat::Jpeg, ImageType::Jpeg),
        Ok(format @ (ImageFormat::Gif | ImageFormat::WebP)) => (format, ImageType::Png),
        _ => return Err(BadImage::Corrupt),
    };
    let reader = || ImageReader::with_format(Cursor::new(&bytes), format);
    let (width, height) = reader().into_dimensions().map_err(|_| BadImage::Corrupt)?;
    let pixels = u64::from(width) * u64::from(height);
    if width > MAX_SIDE_READ_BYTES || height > MAX_SIDE_READ_BYTES || pixels > MAX_PIXELS {
        return Err(BadImage::TooLarge { width, height });
    }
    if format == ImageFormat::Jpeg && pixels.saturating_mul(scans(&bytes)) > MAX_PIXELS_SCANNED {
        return Err(BadImage::TooManyScans);
    }
    let mut limits = Limits::default();
    limits.max_alloc = Some(DECODING_MEMORY);
    let mut reader = reader();
    reader.limits(limits);
    let decoded = reader.decode().map_err(|error| match error {
        image::ImageError::Limits(_) => BadImage::TooLarge { width, height },
        _ => BadImage::Corrupt,
    })?;
    let frames = match format {
        ImageFormat::Gif => gif_frames(&bytes),
        ImageFormat::WebP => webp_frames(&bytes),
        _ => None,
    };
    let fits = width <= MAX_SIDE_LENGTH && height <= MAX_SIDE_LENGTH;
    if fits && matches!(format, ImageFormat::Png | ImageFormat::Jpeg) && bytes.len() <= MAX_BYTES {
        return Ok(Image {
            kind,
            bytes,
            width,
            height,
            scaled_from: None,
            frames,
        });
    }
    let mut image = scale_down(decoded, kind)?;
    image.frames = frames;
    image.scaled_from = image
        .scaled_from
        .filter(|from| *from != (image.width, image.height));
    Ok(image)
}

/// Counts the frames of a GIF by its structure only. `None` if there is just one.
fn gif_frames(gif: &[u8]) -> Option<u32> {
    let table = |flags: u8| {
        if flags & 0x80 == 0 {
            0
        } else {
            3 << ((flags & 7) + 1)
        }
    };
    let mut frames = 0u32;
    let mut at = 13 + table(*gif.get(10)?);
    loop {
        at = match gif.get(at) {
            Some(0x2c) => {
                frames += 1;
                // The descriptor, its colour table, and one byte before the data.
                after_blocks(
                    gif,
                    at + 10 + table(gif.get(at + 9).copied().unwrap_or(0)) + 1,
                )
            }
            Some(0x21) => after_blocks(gif, at + 2),
            _ => return (frames > 1).then_some(frames),
        };
    }
}

/// Skips length-prefixed blocks, up to and including the empty one.
fn after_blocks(gif: &[u8], mut at: usize) -> usize {
    while let Some(length) = gif.get(at).filter(|length| **length > 0) {
        at += 1 + usize::from(*length);
    }
    at + 1
}

/// Counts the frames of a WebP: its `ANMF` chunks. `None` if there is just one.
fn webp_frames(webp: &[u8]) -> Option<u32> {
    let mut frames = 0u32;
    let mut at = 12;
    while let (Some(kind), Some(Ok(length))) = (
        webp.get(at..at + 4),
        webp.get(at + 4..at + 8).map(<[u8; 4]>::try_from),
    ) {
        frames += u32::from(kind == b"ANMF");
        // Chunks are padded to an even length.
        at = at
            .saturating_add(8)
            .saturating_add((u32::from_le_bytes(length) as usize).next_multiple_of(2));
    }
    (frames > 1).then_some(frames)
}

/// Counts the scans of a JPEG: its start-of-scan markers. Compressed data cannot contain this pair
/// of bytes; metadata can, and the image then counts as slower than it is.
fn scans(jpeg: &[u8]) -> u64 {
    jpeg.windows(2).filter(|pair| *pair == [0xff, 0xda]).count() as u64
}

fn scale_down(original: DynamicImage, kind: ImageType) -> Result<Image, BadImage> {
    let scaled_from = Some((original.width(), original.height()));
    let mut side = MAX_SIDE_LENGTH.min(original.width().max(original.height()));
    // Filtering needs 16 bytes for each pixel of one side; averaging first needs none.
    let first = 2 * MAX_SIDE_LENGTH;
    let original = if original.width().max(original.height()) > first {
        original.thumbnail(first, first)
    } else {
        original
    };
    loop {
        let scaled = original.resize(side, side, FilterType::Triangle);
        let mut bytes = Vec::new();
        match kind {
            ImageType::Jpeg => {
                scaled.write_with_encoder(JpegEncoder::new_with_quality(&mut bytes, 85))
            }
            ImageType::Png => scaled.write_to(&mut Cursor::new(&mut bytes), ImageFormat::Png),
        }
        .map_err(|_| BadImage::Corrupt)?;
        if bytes.len() <= MAX_BYTES || side < 64 {
            let (width, height) = (scaled.width(), scaled.height());
            return Ok(Image {
                kind,
                bytes,
                width,
                height,
                scaled_from,
                frames: None,
            });
        }
        side = side * 3 / 4;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a PNG whose pixels do not compress well when `noisy`.
    pub(in crate::session) fn png(width: u32, height: u32, noisy: bool) -> Vec<u8> {
        let mut state = 1u32;
        let picture = image::RgbImage::from_fn(width, height, |_, _| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            if noisy {
                image::Rgb([(state >> 24) as u8, (state >> 16) as u8, (state >> 8) as u8])
            } else {
                image::Rgb([9, 9, 9])
            }
        });
        let mut bytes = Vec::new();
        picture
            .write_to(&mut Cursor::new(&mut bytes), ImageFormat::Png)
            .unwrap();
        bytes
    }

    #[test]
    fn a_small_image_passes_unchanged() {
        let bytes = png(64, 48, false);
        let image = encode(bytes.clone()).unwrap();
        assert_eq!(
            (image.kind, image.width, image.height, image.scaled_from),
            (ImageType::Png, 64, 48, None)
        );
        assert_eq!(image.bytes, bytes);
    }

    #[test]
    fn a_large_image_is_scaled_and_keeps_its_shape() {
        let image = encode(png(3136, 784, false)).unwrap();
        assert_eq!(
            (image.width, image.height, image.scaled_from),
            (1568, 392, Some((3136, 784)))
        );
    }

    #[test]
    fn an_image_with_too_many_bytes_is_scaled_until_it_fits() {
        let bytes = png(1400, 1200, true);
        assert!(bytes.len() > MAX_BYTES);
        let image = encode(bytes).unwrap();
        assert!(image.bytes.len() <= MAX_BYTES);
        assert_eq!(image.scaled_from, Some((1400, 1200)));
    }

    /// Returns a GIF with this many frames, the first of which is red.
    fn gif(width: u32, height: u32, frames: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = image::codecs::gif::GifEncoder::new(&mut bytes);
        for number in 0..frames {
            let colour = if number == 0 {
                [255, 0, 0, 255]
            } else {
                [0, 0, 255, 255]
            };
            let picture = image::RgbaImage::from_pixel(width, height, image::Rgba(colour));
            encoder.encode_frame(image::Frame::new(picture)).unwrap();
        }
        drop(encoder);
        bytes
    }

    /// Returns an animated WebP whose frames are all the same image.
    fn animated_webp(width: u32, height: u32, frames: usize) -> Vec<u8> {
        let mut still = Vec::new();
        let picture = image::RgbaImage::from_pixel(width, height, image::Rgba([255, 0, 0, 255]));
        picture
            .write_to(&mut Cursor::new(&mut still), ImageFormat::WebP)
            .unwrap();
        let size = |length: u32| length.to_le_bytes()[..3].to_vec();
        let chunk = |kind: &[u8], data: &[u8]| {
            let length = u32::try_from(data.len()).unwrap().to_le_bytes();
            [kind, &length, data, &vec![0; data.len() % 2]].concat()
        };
        let sides = [size(width - 1), size(height - 1)].concat();
        let frame = [&[0; 6][..], &sides, &size(100), &[0], &still[12..]].concat();
        let header = [&[0x12, 0, 0, 0][..], &sides].concat();
        let mut all = [
            b"WEBP".to_vec(),
            chunk(b"VP8X", &header),
            chunk(b"ANIM", &[0; 6]),
        ]
        .concat();
        all.extend(std::iter::repeat_n(chunk(b"ANMF", &frame), frames).flatten());
        chunk(b"RIFF", &all)
    }

    #[test]
    fn of_an_animation_the_first_frame_is_shown_as_a_png() {
        for (bytes, frames) in [
            (gif(6, 4, 3), Some(3)),
            (gif(6, 4, 1), None),
            (animated_webp(6, 4, 2), Some(2)),
            (animated_webp(6, 4, 1), None),
        ] {
            let image = encode(bytes).unwrap();
            assert_eq!(
                (image.kind, image.width, image.height, image.scaled_from),
                (ImageType::Png, 6, 4, None)
            );
            assert_eq!(image.frames, frames);
            let shown = image::load_from_memory_with_format(&image.bytes, ImageFormat::Png)
                .unwrap()
                .into_rgb8();
            let [red, green, blue] = shown.get_pixel(5, 3).0;
            assert!(
                red > 250 && green == 0 && blue == 0,
                "a GIF has a palette, which need not be exact"
            );
        }
        let large = encode(gif(1600, 8, 2)).unwrap();
        assert_eq!(
            (large.width, large.scaled_from, large.frames),
            (1568, Some((1600, 8)), Some(2))
        );
    }

    #[test]
    fn animations_that_are_cut_or_lie_about_their_size_are_refused() {
        for whole in [gif(6, 4, 2), animated_webp(6, 4, 2)] {
            for length in [7, 14, 20, 30] {
                assert_eq!(
                    encode(whole[..length].to_vec()),
                    Err(BadImage::Corrupt),
                    "{length} bytes"
                );
            }
        }
        let mut screen = gif(6, 4, 1);
        screen[6..10].copy_from_slice(&[0xff; 4]);
        assert_eq!(
            encode(screen),
            Err(BadImage::TooLarge {
                width: 65535,
                height: 65535
            })
        );
        // The screen is small, and the image on it is not.
        let mut picture = gif(6, 4, 1);
        let descriptor = picture
            .windows(9)
            .position(|part| part == [0x2c, 0, 0, 0, 0, 6, 0, 4, 0])
            .unwrap();
        picture[descriptor + 5..descriptor + 9].copy_from_slice(&[0xff; 4]);
        assert!(encode(picture).is_err());
        // Structures that point back, or nowhere, end the counting.
        assert_eq!(gif_frames(&[0xff; 40]), None);
        assert_eq!(gif_frames(b"GIF89a"), None);
        assert_eq!(webp_frames(&[0xff; 40]), None);
    }

    #[test]
    fn corrupt_bytes_and_bombs_are_refused() {
        assert_eq!(encode(b"no image".to_vec()), Err(BadImage::Corrupt));
        let mut cut = png(64, 48, true);
        cut.truncate(cut.len() / 2);
        assert_eq!(encode(cut), Err(BadImage::Corrupt));
        assert_eq!(
            encode(png_that_claims(65_536, 65_536)),
            Err(BadImage::TooLarge {
                width: 65536,
                height: 65536
            })
        );
    }

    /// Returns a PNG whose header claims this size, with the pixels of a small image.
    fn png_that_claims(width: u32, height: u32) -> Vec<u8> {
        let mut bytes = png(64, 48, false);
        bytes[16..20].copy_from_slice(&width.to_be_bytes());
        bytes[20..24].copy_from_slice(&height.to_be_bytes());
        let checksum = crc32(&bytes[12..29]).to_be_bytes();
        bytes[29..33].copy_from_slice(&checksum);
        bytes
    }

    #[test]
    fn more_than_32_megapixels_are_refused_in_words_before_decoding() {
        let refused = encode(png_that_claims(16_000, 16_000)).unwrap_err();
        assert_eq!(
            refused,
            BadImage::TooLarge {
                width: 16_000,
                height: 16_000
            }
        );
        assert!(
            refused
                .to_string()
                .contains("16000 × 16000 pixels, and the limit is 32 million"),
            "{refused}"
        );
        assert!(matches!(
            encode(png_that_claims(8_000, 4_001)),
            Err(BadImage::TooLarge { .. })
        ));
        // One pixel row less passes the header check; its pixels are missing.
        assert_eq!(
            encode(png_that_claims(8_000, 4_000)),
            Err(BadImage::Corrupt),
            "control"
        );
    }

    #[test]
    fn a_jpeg_of_many_scans_is_refused() {
        let mut bytes = Vec::new();
        let picture = DynamicImage::from(image::RgbImage::new(4_000, 4_000));
        picture
            .write_with_encoder(JpegEncoder::new_with_quality(&mut bytes, 85))
            .unwrap();
        assert_eq!(scans(&bytes), 1);
        assert_eq!(
            encode(bytes.clone()).unwrap().width,
            MAX_SIDE_LENGTH,
            "control"
        );
        bytes.extend([0xff, 0xda].repeat(24));
        assert_eq!(encode(bytes), Err(BadImage::TooManyScans));
    }

    #[tokio::test(start_paused = true)]
    async fn images_wait_for_a_decoder_and_say_when_there_is_none() {
        let decoders: &'static Semaphore = Box::leak(Box::new(Semaphore::new(0)));
        let one = || vec![png(64, 48, false)];
        assert_eq!(
            encode_within(one(), decoders, BUDGET).await,
            [Err(BadImage::Busy)]
        );
        decoders.add_permits(1);
        assert!(
            encode_within(one(), decoders, BUDGET).await[0].is_ok(),
            "control"
        );
        assert_eq!(decoders.available_permits(), 1);
    }

    #[tokio::test]
    async fn the_images_of_a_cell_have_a_budget() {
        let decoders: &'static Semaphore = Box::leak(Box::new(Semaphore::new(1)));
        let three = || vec![png(64, 48, false); 3];
        let all = encode_within(three(), decoders, BUDGET).await;
        assert!(all.iter().all(Result::is_ok), "control");
        let some = encode_within(three(), decoders, Duration::from_nanos(1)).await;
        assert!(some[0].is_ok());
        assert_eq!(
            some[1..],
            [Err(BadImage::OutOfTime), Err(BadImage::OutOfTime)]
        );
    }

    fn crc32(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |sum, byte| {
            (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
                if sum & 1 == 1 {
                    sum >> 1 ^ 0xedb8_8320
                } else {
                    sum >> 1
                }
            })
        })
    }
}
