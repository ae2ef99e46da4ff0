// Classify images in the browser with a file of `softline export` and onnxruntime-web.
import * as ort from "./ort.wasm.bundle.min.mjs";

// pages that are not cross-origin isolated have one thread
ort.env.wasm.numThreads = self.crossOriginIsolated ? navigator.hardwareConcurrency : 1;

// onnxruntime-web does not hand out a file's metadata: read field 14 of the protobuf message, pairs of strings.
export function readMetadata(bytes) {
    const about = {};
    for (const [field, entry] of fields(bytes)) {
        if (field !== 14) continue;
        const [key, value] = [...fields(entry)].map(([, text]) => new TextDecoder().decode(text));
        about[key] = JSON.parse(value);
    }
    return about;
}

function* fields(bytes) {
    let at = 0;
    const number = () => {
        let value = 0;
        for (let factor = 1; ; factor *= 128) {
            const byte = bytes[at++];
            value += (byte & 127) * factor;
            if (byte < 128) return value;
        }
    };
    while (at < bytes.length) {
        const tag = number();
        if ((tag & 7) === 0) number();
        else if ((tag & 7) === 2) {
            const length = number();
            yield [tag >> 3, bytes.subarray(at, at + length)];
            at += length;
        } else throw new Error("this is no ONNX file");
    }
}

export async function openModel(address) {
    const response = await fetch(address);
    if (!response.ok) throw new Error(`${address}: ${response.status} ${response.statusText}`);
    const bytes = new Uint8Array(await response.arrayBuffer());
    const about = readMetadata(bytes);
    if (about.task !== "classification" || !about.mean)
        throw new Error(`${address} is no classifier of softline that takes normalised images`);
    const crop = about.softline.description.settings.crop_mode;
    if (crop !== "center") throw new Error(`this example crops the centre, the network was trained for ${crop}`);
    return { about, session: await ort.InferenceSession.create(bytes) };
}

// The centre of an image, as values [1, C, H, W] that are normalised as in training.
export function prepare(image, about) {
    const { height, width } = about.size;
    const part = about.softline.description.settings.crop_pct;
    const scale = Math.max(width / image.width, height / image.height) / part;
    const context = new OffscreenCanvas(width, height).getContext("2d");
    context.imageSmoothingQuality = "high";
    const size = [image.width * scale, image.height * scale];
    context.drawImage(image, Math.round((width - size[0]) / 2), Math.round((height - size[1]) / 2), ...size);
    const { data } = context.getImageData(0, 0, width, height);
    const channels = about.mean.length;
    const values = new Float32Array(channels * height * width);
    for (let place = 0; place < height * width; place++) {
        const [red, green, blue] = data.subarray(4 * place, 4 * place + 3);
        const colours = channels === 1 ? [Math.round(0.299 * red + 0.587 * green + 0.114 * blue)] : [red, green, blue];
        colours.forEach((value, channel) => {
            values[channel * height * width + place] = (value / 255 - about.mean[channel]) / about.std[channel];
        });
    }
    return new ort.Tensor("float32", values, [1, channels, height, width]);
}

export async function classify({ about, session }, image) {
    const { logits } = await session.run({ images: prepare(image, about) });
    const powers = [...logits.data].map((logit) => Math.exp(logit - Math.max(...logits.data)));
    const sum = powers.reduce((a, b) => a + b);
    return powers.map((power, label) => ({ name: about.classes[label] ?? `${label}`, probability: power / sum }));
}
